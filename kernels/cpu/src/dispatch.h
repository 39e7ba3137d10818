// Which instructions the kernels may use, and how they report refusals.
//
// A kernel file that needs vector instructions puts its code between EC_BEGIN_AVX2, EC_BEGIN_AVX512,
// EC_BEGIN_NEON_DOT... and EC_END_TARGET, after all includes: code of the standard library that were
// compiled inside would be shared with the portable path and break it on an older machine.
#pragma once

#include <cstdint>

#define EC_INLINE static inline __attribute__((always_inline, unused))
// Before a loop over registers: without it they are laid down in memory before it is unrolled.
#define EC_UNROLL _Pragma("GCC unroll 16")
#define EC_EXPORT extern "C" __attribute__((visibility("default")))

// Four of the eight elements of two vectors, by number.
#if defined(__clang__)
#define EC_SHUFFLE_4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t ec_shuffle_4 __attribute__((vector_size(16)));
#define EC_SHUFFLE_4(a, b, i, j, k, l) __builtin_shuffle(a, b, ec_shuffle_4{i, j, k, l})
#endif

#define EC_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define EC_BEGIN(features) \
    EC_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define EC_END_TARGET _Pragma("clang attribute pop")
#else
#define EC_BEGIN(features) _Pragma("GCC push_options") EC_PRAGMA(GCC target(features))
#define EC_END_TARGET _Pragma("GCC pop_options")
#endif

#if defined(__x86_64__)
#define EC_X86 1
#define EC_ARM 0
#define EC_BEGIN_AVX2 EC_BEGIN("avx2,fma,f16c")
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11  // others do not know it
#define EC_BEGIN_AVX2_VNNI EC_BEGIN("avx2,fma,f16c,avxvnni")
#endif
#ifdef EC_EMULATED_AVX512  // tests/kernels/cpu/emulated_avx512 writes the instructions out
#define EC_AVX512 "avx2,fma,f16c"
#define EC_BEGIN_AVX512_BF16 EC_BEGIN(EC_AVX512)
#else
#define EC_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define EC_BEGIN_AVX512_BF16 EC_BEGIN(EC_AVX512 ",avx512bf16")
#endif
#define EC_BEGIN_AVX512 EC_BEGIN(EC_AVX512)
#elif defined(__aarch64__)
#define EC_X86 0
#define EC_ARM 1
#define EC_BEGIN_NEON_DOT EC_BEGIN("arch=armv8.2-a+dotprod")
#define EC_BEGIN_NEON_I8MM EC_BEGIN("arch=armv8.2-a+dotprod+i8mm+bf16")
#else
#define EC_X86 0
#define EC_ARM 0
#endif

namespace ec {

// A line that is written next: from another thread's cache it comes as one's own. Compilers make a
// fetch to read of it where not all of a set's machines have this; on those it does nothing.
inline void fetch_to_write(const void* at) {
#if EC_X86
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
    __builtin_prefetch(at, 1);
#endif
}

// In this order; a set has all that those before it have, and runs their kernels where it has none of
// its own. The last is never chosen by itself: tests force it where vectors have all of avx512_bf16.
#if EC_ARM
// neon: every AArch64 processor; neon_dot: dot products of bytes (FEAT_DotProd); neon_i8mm: products of
// 2 x 8 by 8 x 2 bytes and of bfloat16, too (FEAT_I8MM and FEAT_BF16). None has the tiles of amx.
enum class Isa : int { portable = 0, neon = 1, neon_dot = 2, neon_i8mm = 3, amx = 4, amx_emulated = 5 };
#else
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4, amx_emulated = 5 };
#endif

// The best that this machine has.
Isa machine_isa();

// What kernels use now: the machine's, unless a test has forced a lower one.
Isa isa();

// Whether the set avx2 multiplies bytes by AVX-VNNI, which some machines have: faster, the same bits.
bool has_avx_vnni();

// Writes the text of a refusal where it stays until this thread's next one, and returns it. Every
// exported operation returns null, or such a text: what, the number, the limit. An int64_t is %ld.
__attribute__((format(printf, 1, 2))) const char* refuse(const char* format, ...);

}  // namespace ec
