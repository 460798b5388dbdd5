// Lets the module load beside a C library older than the one that it was built with.
//
// libstdc++ asks __libc_single_threaded whether a reference count needs an atomic instruction. The variable came with
// glibc 2.32, and would be the only thing here that torch's own minimum, 2.28, has not. The module has its own, hidden,
// which always says that there are threads.
extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;
}
