#include "dispatch.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "tiles.h"

#if EC_X86
#include <cpuid.h>
#elif EC_ARM
#include <sys/auxv.h>
#endif

namespace ec {
namespace {

constexpr int with_avx_vnni = 256;  // beside a forced avx2

std::atomic<int> forced_isa{-1};
thread_local char refusal[512];

#if EC_ARM
// Bits of Linux's arch/arm64/include/uapi/asm/hwcap.h, which older headers lack.
bool has_dot() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
bool has_i8mm() {
    const unsigned long more = getauxval(AT_HWCAP2);
    return (more >> 13 & 1) != 0 && (more >> 14 & 1) != 0;  // and bf16
}
#endif

}  // namespace

Isa machine_isa() {
#if EC_X86
    static const Isa found = [] {
        __builtin_cpu_init();
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("f16c");
        if (!has_avx2) return Isa::portable;
#ifdef EC_EMULATED_AVX512
        return Isa::avx512_bf16;
#endif
        const bool has_avx512 =
            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni");
        if (!has_avx512) return Isa::avx2;
        if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512;
        return obtain_tiles() ? Isa::amx : Isa::avx512_bf16;
    }();
    return found;
#elif EC_ARM
    static const Isa found = !has_dot() ? Isa::neon : has_i8mm() ? Isa::neon_i8mm : Isa::neon_dot;
    return found;
#else
    return Isa::portable;
#endif
}

Isa isa() {
    const int forced = forced_isa.load(std::memory_order_relaxed);
    return forced < 0 ? machine_isa() : static_cast<Isa>(forced & ~with_avx_vnni);
}

static bool machine_has_avx_vnni() {
#ifdef EC_BEGIN_AVX2_VNNI
    static const bool found = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        return machine_isa() >= Isa::avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 &&
               (a & 16) != 0;  // which not all compilers have a name for
    }();
    return found;
#else
    return false;
#endif
}

bool has_avx_vnni() {
    const int forced = forced_isa.load(std::memory_order_relaxed);
    return forced < 0 ? machine_has_avx_vnni() : (forced & with_avx_vnni) != 0;
}

const char* refuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(refusal, sizeof refusal, format, arguments);
    va_end(arguments);
    return refusal;
}

}  // namespace ec

EC_EXPORT int ec_machine_isa() { return static_cast<int>(ec::machine_isa()); }

EC_EXPORT int ec_isa() { return static_cast<int>(ec::isa()); }

EC_EXPORT int ec_machine_has_avx_vnni() { return ec::machine_has_avx_vnni(); }

// level: an `Isa`, or -1 for the machine's own again; 257: avx2 with AVX-VNNI.
EC_EXPORT const char* ec_force_isa(int level) {
    using ec::Isa;
    const int machine = static_cast<int>(ec::machine_isa());
    const bool is_avx_vnni = level == (1 | ec::with_avx_vnni);  // of avx2
    if (is_avx_vnni && ec::machine_has_avx_vnni()) {
        ec::forced_isa.store(level);
        return nullptr;
    }
    const bool is_emulated = EC_X86 && level == static_cast<int>(Isa::amx_emulated);
    constexpr int least = 3;  // avx512_bf16
    if (is_emulated ? machine < least : level < -1 || level > machine) {
        return ec::refuse("instruction set %d is not in [-1, %d], what this machine has, nor %d with "
                          "at least %d", level, machine, static_cast<int>(Isa::amx_emulated), least);
    }
    ec::forced_isa.store(level);
    return nullptr;
}
