// Compiles EC_BODY once an instruction set, in namespaces ec::portable, ec::avx2 and ec::avx512, or
// ec::portable and ec::neon, and makes EC_CHOOSE(function) the one for this machine. With EC_WITH_BF16
// defined there is ec::avx512_bf16 or ec::neon_i8mm as well, and EC_CHOOSE_BF16; with EC_WITH_BYTES, of
// sets that differ in products of bytes, ec::avx2_vnni or ec::neon_dot and ec::neon_i8mm, and
// EC_CHOOSE_BYTES.
//
// EC_LEVEL tells a body the x86 set that it is compiled for, EC_NEON the Arm set (0 for none): of both the
// value of `Isa`.
//
// Include it last, after `#define EC_BODY "..."` and every other header: what the standard library
// gives must not be compiled for instructions that a machine may lack. No include guard.

#include "dispatch.h"

#if EC_X86
#include <immintrin.h>
#elif EC_ARM
#include <arm_neon.h>
#endif

#define EC_LEVEL 0
#define EC_NEON 0
namespace ec::portable {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::portable
#undef EC_LEVEL

#if EC_X86
#define EC_LEVEL 1
EC_BEGIN_AVX2
namespace ec::avx2 {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::avx2
EC_END_TARGET
#undef EC_LEVEL

#if defined(EC_WITH_BYTES) && defined(EC_BEGIN_AVX2_VNNI)
#define EC_LEVEL 1
#define EC_AVX_VNNI 1
EC_BEGIN_AVX2_VNNI
namespace ec::avx2_vnni {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::avx2_vnni
EC_END_TARGET
#undef EC_AVX_VNNI
#undef EC_LEVEL
#endif

#define EC_LEVEL 2
EC_BEGIN_AVX512
namespace ec::avx512 {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::avx512
EC_END_TARGET
#undef EC_LEVEL

#ifdef EC_WITH_BF16
#define EC_LEVEL 3
EC_BEGIN_AVX512_BF16
namespace ec::avx512_bf16 {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::avx512_bf16
EC_END_TARGET
#undef EC_LEVEL
#endif

#define EC_CHOOSE(function)                                                     \
    (::ec::isa() >= ::ec::Isa::avx512 ? ::ec::avx512::function                  \
     : ::ec::isa() == ::ec::Isa::avx2 ? ::ec::avx2::function                    \
                                      : ::ec::portable::function)
#define EC_CHOOSE_BF16(function)                                                \
    (::ec::isa() >= ::ec::Isa::avx512_bf16 ? ::ec::avx512_bf16::function        \
                                           : EC_CHOOSE(function))
#ifdef EC_BEGIN_AVX2_VNNI
#define EC_CHOOSE_BYTES(function)                                               \
    (::ec::isa() == ::ec::Isa::avx2 && ::ec::has_avx_vnni() ? ::ec::avx2_vnni::function \
                                                            : EC_CHOOSE(function))
#else
#define EC_CHOOSE_BYTES(function) EC_CHOOSE(function)
#endif
#elif EC_ARM
#undef EC_NEON
#define EC_LEVEL 0
#define EC_NEON 1
namespace ec::neon {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::neon
#undef EC_NEON

#ifdef EC_WITH_BYTES
#define EC_NEON 2
EC_BEGIN_NEON_DOT
namespace ec::neon_dot {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::neon_dot
EC_END_TARGET
#undef EC_NEON
#endif

#if defined(EC_WITH_BYTES) || defined(EC_WITH_BF16)
#define EC_NEON 3
EC_BEGIN_NEON_I8MM
namespace ec::neon_i8mm {
#include "lanes.h"
#include EC_BODY
}  // namespace ec::neon_i8mm
EC_END_TARGET
#undef EC_NEON
#endif
#undef EC_LEVEL

#define EC_CHOOSE(function)                                                     \
    (::ec::isa() >= ::ec::Isa::neon ? ::ec::neon::function : ::ec::portable::function)
#define EC_CHOOSE_BF16(function)                                                \
    (::ec::isa() >= ::ec::Isa::neon_i8mm ? ::ec::neon_i8mm::function : EC_CHOOSE(function))
#define EC_CHOOSE_BYTES(function)                                               \
    (::ec::isa() >= ::ec::Isa::neon_i8mm  ? ::ec::neon_i8mm::function           \
     : ::ec::isa() == ::ec::Isa::neon_dot ? ::ec::neon_dot::function            \
                                          : EC_CHOOSE(function))
#else
#define EC_CHOOSE(function) (::ec::portable::function)
#define EC_CHOOSE_BYTES(function) (::ec::portable::function)
#define EC_CHOOSE_BF16(function) (::ec::portable::function)
#endif
