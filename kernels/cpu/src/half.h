// Reading float16 and e8m0, and rounding to bfloat16, without the instructions for it.
#pragma once

#include <cstdint>
#include <cstring>

namespace ec {

// The two bytes at `from`, of any alignment.
inline float half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31;
    const uint32_t fraction = half & 1023;
    if (exponent == 0) {
        const float value = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -value : value;
    }
    const uint32_t bits =
        sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// 2^(exponent - 128): half of what an e8m0 scale means.
inline float half_of_power(uint8_t exponent) {
    const uint32_t e = exponent, bits = e > 1 ? (e - 1) << 23 : (e + 1) << 21;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounded to even; a NaN stays one.
inline uint32_t bfloat16_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return is_nan ? bits >> 16 | 0x40 : rounded;
}

}  // namespace ec
