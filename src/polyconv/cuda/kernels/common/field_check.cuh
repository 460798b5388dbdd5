// Assertions in a generated source that the host (cuda/planner/kernel_params.py) and the device agree on a Params
// struct. NVRTC has offsetof since 13.4. Older front ends have the operator that offsetof is defined with elsewhere.
#pragma once

#if defined(__CUDACC_RTC__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1304
#define POLYCONV_OFFSET(type, field) __INTADDR__(&((type*)0)->field)
#else
#define POLYCONV_OFFSET(type, field) __builtin_offsetof(type, field)
#endif

#define POLYCONV_FIELD(type, field, offset, bytes)                                      \
  static_assert(POLYCONV_OFFSET(type, field) == offset && sizeof(type::field) == bytes, \
                "host and device disagree about " #type "::" #field)
