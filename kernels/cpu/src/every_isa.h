// Compiles EC_BODY once an instruction set, in namespaces ec::portable, ec::avx2 and ec::avx512,
// and makes EC_CHOOSE(function) the one for this machine. With EC_WITH_BF16 defined there is
// ec::avx512_bf16 as well, and EC_CHOOSE_BF16; with EC_WITH_AVX_VNNI ec::avx2_vnni, and EC_CHOOSE_VNNI.
//
// Include it last, after `#define EC_BODY "..."` and every other header: what the standard library
// gives must not be compiled for instructions that a machine may lack. No include guard.

#include "dispatch.h"

#if EC_X86
#include <immintrin.h>
#endif

#define EC_LEVEL 0
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

#if defined(EC_WITH_AVX_VNNI) && defined(EC_BEGIN_AVX2_VNNI)
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
#define EC_CHOOSE_VNNI(function)                                                \
    (::ec::isa() == ::ec::Isa::avx2 && ::ec::has_avx_vnni() ? ::ec::avx2_vnni::function \
                                                            : EC_CHOOSE(function))
#else
#define EC_CHOOSE_VNNI(function) EC_CHOOSE(function)
#endif
#else
#define EC_CHOOSE(function) (::ec::portable::function)
#define EC_CHOOSE_VNNI(function) (::ec::portable::function)
#define EC_CHOOSE_BF16(function) (::ec::portable::function)
#endif
