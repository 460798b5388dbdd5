// The same for this module: see there.
#include "../cpu/common/glibc.cc"
