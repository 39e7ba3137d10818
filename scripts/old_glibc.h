// Before every file of the library in a wheel: what newer versions of glibc have under a new version
// is taken from the old one, which they keep, so that the library loads on older systems, too.
// auditwheel says what a wheel still needs.
#if defined(__x86_64__) && defined(__gnu_linux__)
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4");
#elif defined(__aarch64__) && defined(__gnu_linux__)
__asm__(".symver log, log@GLIBC_2.17");
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.17");
#endif
