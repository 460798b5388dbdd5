// Lets the module load with an older C library than it was built with.
// libstdc++ reads __libc_single_threaded to skip atomic reference counting. The variable came with glibc 2.32 and would
// be the only symbol here that torch's minimum, 2.28, lacks. This hidden definition always says that there are threads.
extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;
}
