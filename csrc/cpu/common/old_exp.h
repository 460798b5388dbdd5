// Binds exp, which the activations in double call, to the version that glibc 2.28 has: the oldest that torch supports.
// glibc 2.29 added a new version of the symbol (without errno). See glibc.cc as well.
#pragma once

#include <cmath>

#ifdef __GLIBC__
#if defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver exp,exp@GLIBC_2.17");
#endif
#endif
