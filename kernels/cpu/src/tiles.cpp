// The tiles' emulation, and permission to use the real ones. See tiles.h.
#include "tiles.h"

#include <cstring>

#if EC_X86
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ec {

#if EC_TILES
thread_local const TileShapes* Tiles::current = nullptr;
#endif

bool obtain_tiles() {
#if EC_TILES && defined(__linux__)
    constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, needed = bf16 | tile | int8;
    constexpr long request_permission = 0x1023, tile_data = 18;  // of arch_prctl
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & needed) != needed) return false;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

void release_tiles() {
#if EC_TILES
    Tiles::release();
#endif
    EmulatedTiles::release();
}

namespace {

struct Emulated {
    const TileShapes* shapes = nullptr;
    alignas(64) uint8_t bytes[8][16][64];
};
thread_local Emulated own;

// The shapes, if a tile has one.
const TileShapes& shapes_of(int tile) {
    if (own.shapes == nullptr || tile < 0 || tile > 7 || own.shapes->num_rows[tile] == 0)
        __builtin_trap();
    return *own.shapes;
}

#if EC_X86
EC_BEGIN_AVX512
// temp1 of the manual: sums over k of the even and of the odd elements apart, from zero; then the two
// are added, and to the tile last.
__attribute__((noinline)) void multiply_bf16_rows(int num_rows, int num_pairs, const uint8_t (*x)[64],
                                             const uint8_t (*w)[64], uint8_t (*sum)[64]) {
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int m = 0; m < num_rows; ++m) {
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int k = 0; k < num_pairs; ++k) {
            int32_t both;
            std::memcpy(&both, x[m] + 4 * k, 4);
            const __m512i pair = _mm512_set1_epi32(both), own_w = _mm512_load_si512(w[k]);
            sums[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)),
                                      _mm512_castsi512_ps(_mm512_slli_epi32(own_w, 16)), sums[0]);
            sums[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, odd)),
                                      _mm512_castsi512_ps(_mm512_and_si512(own_w, odd)), sums[1]);
        }
        auto* to = reinterpret_cast<float*>(sum[m]);
        _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(sums[0], sums[1])));
    }
}
EC_END_TARGET

// Denormal inputs and results are zeros, rounding is to even, no exception is raised.
void multiply_bf16(int num_rows, int num_pairs, const uint8_t (*x)[64], const uint8_t (*w)[64],
              uint8_t (*sum)[64]) {
    constexpr unsigned masked = 0x1f80, flush = 0x8000, denormals_are_zeros = 0x0040;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(masked | flush | denormals_are_zeros);
    multiply_bf16_rows(num_rows, num_pairs, x, w, sum);
    _mm_setcsr(before);
}
#else
void multiply_bf16(int, int, const uint8_t (*)[64], const uint8_t (*)[64], uint8_t (*)[64]) {}
#endif

// Sums wrap.
void multiply_bytes(EmulatedTiles::Product product, int num_rows, int num_fours, const uint8_t (*x)[64],
               const uint8_t (*w)[64], uint8_t (*sum)[64]) {
    using Product = EmulatedTiles::Product;
    const auto wide = [](uint8_t byte, bool is_unsigned) {
        return is_unsigned ? byte : static_cast<int8_t>(byte);
    };
    for (int m = 0; m < num_rows; ++m) {
        uint32_t sums[16];
        std::memcpy(sums, sum[m], 64);
        for (int k = 0; k < num_fours; ++k) {
            for (int n = 0; n < 16; ++n) {
                for (int i = 0; i < 4; ++i) {
                    const int left = wide(x[m][4 * k + i], product == Product::unsigned_signed);
                    const int right = wide(w[k][4 * n + i], product == Product::signed_unsigned);
                    sums[n] += static_cast<uint32_t>(left * right);
                }
            }
        }
        std::memcpy(sum[m], sums, 64);
    }
}

}  // namespace

void EmulatedTiles::configure(const TileShapes& shapes) {
    if (own.shapes == &shapes) return;
    if (shapes.palette != 1 || shapes.start_row != 0) __builtin_trap();
    for (int tile = 0; tile < 16; ++tile) {
        const int rows = shapes.num_rows[tile], bytes = shapes.row_bytes[tile];
        if (rows > 16 || bytes > 64 || (rows == 0) != (bytes == 0) || (tile > 7 && rows > 0))
            __builtin_trap();
    }
    own.shapes = &shapes;
    std::memset(own.bytes, 0, sizeof own.bytes);
}

void EmulatedTiles::release() { own.shapes = nullptr; }

void EmulatedTiles::zero(int tile) {
    shapes_of(tile);
    std::memset(own.bytes[tile], 0, sizeof own.bytes[tile]);
}

void EmulatedTiles::load(int tile, const void* from, int64_t stride) {
    const TileShapes& shapes = shapes_of(tile);
    zero(tile);
    for (int row = 0; row < shapes.num_rows[tile]; ++row) {
        std::memcpy(own.bytes[tile][row], static_cast<const uint8_t*>(from) + row * stride,
                    shapes.row_bytes[tile]);
    }
}

void EmulatedTiles::store(int tile, void* to, int64_t stride) {
    const TileShapes& shapes = shapes_of(tile);
    for (int row = 0; row < shapes.num_rows[tile]; ++row) {
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, own.bytes[tile][row],
                    shapes.row_bytes[tile]);
    }
}

void EmulatedTiles::dot(Product product, int sum, int x, int w) {
    const TileShapes& shapes = shapes_of(sum);
    shapes_of(x);
    shapes_of(w);
    const int num_rows = shapes.num_rows[sum], num_dwords = shapes.row_bytes[x] / 4;
    if (sum == x || sum == w || x == w || shapes.num_rows[x] != num_rows ||
        shapes.num_rows[w] != num_dwords || shapes.row_bytes[w] != shapes.row_bytes[sum] ||
        shapes.row_bytes[x] % 4 != 0 || shapes.row_bytes[w] % 4 != 0) {
        __builtin_trap();
    }
    if (product == Product::bf16) {
        multiply_bf16(num_rows, num_dwords, own.bytes[x], own.bytes[w], own.bytes[sum]);
    } else {
        multiply_bytes(product, num_rows, num_dwords, own.bytes[x],
                  own.bytes[w], own.bytes[sum]);
    }
}

}  // namespace ec

// For tests: sums [16][16] += x [16][64 bytes] times w [16][64 bytes] by one instruction, whose number is
// that of `EmulatedTiles::Product`. Without shapes that instruction is illegal.
EC_EXPORT const char* ec_tiles_prove(int product, int with_shapes, const void* x, const void* w,
                                     void* sums) {
    if (ec::isa() < ec::Isa::amx) {
        return ec::refuse("instruction set %d has no tiles, %d has", static_cast<int>(ec::isa()),
                          static_cast<int>(ec::Isa::amx));
    }
    if (product < 0 || product > 3) return ec::refuse("product %d is not in [0, 3]", product);
    ec::with_tiles([=](auto tiles) {
        using T = decltype(tiles);
        T::release();
        if (with_shapes != 0) T::configure(ec::whole_tiles);
        T::template load<0>(sums, 64);
        T::template load<4>(x, 64);
        T::template load<6>(w, 64);
        if (product == 0) T::template dot_bf16<0, 4, 6>();
        if (product == 1) T::template dot_signed<0, 4, 6>();
        if (product == 2) T::template dot_signed_unsigned<0, 4, 6>();
        if (product == 3) T::template dot_unsigned_signed<0, 4, 6>();
        T::template store<0>(sums, 64);
        T::release();
    });
    return nullptr;
}
