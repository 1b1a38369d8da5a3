/* Counts what the C library's allocator has given out, on all threads, in blocks of LEAST bytes and more.

   Preloaded into a rank (LD_PRELOAD). A tensor's storage on the CPU is such a block, and so is a buffer of gloo's. */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define LEAST 4096

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_llong out, most;

long long atoll_bytes_out(void) { return atomic_load(&out); }

long long atoll_bytes_most(void) { return atomic_load(&most); }

void atoll_forget_most(void) { atomic_store(&most, atomic_load(&out)); }

static void *given(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    if (size >= LEAST) {
        long long now = atomic_fetch_add(&out, (long long)size) + (long long)size;
        long long before = atomic_load(&most);
        while (now > before && !atomic_compare_exchange_weak(&most, &before, now)) {
        }
    }
    return block;
}

static void taken_back(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    if (size >= LEAST) atomic_fetch_sub(&out, (long long)size);
}

void *malloc(size_t size) { return given(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return given(__libc_calloc(count, size)); }

void *memalign(size_t alignment, size_t size) { return given(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    *block = memalign(alignment, size);
    return *block || !size ? 0 : ENOMEM;
}

void *realloc(void *block, size_t size) {
    size_t before = block ? malloc_usable_size(block) : 0;
    void *after = __libc_realloc(block, size);
    if (before >= LEAST && (after || !size)) atomic_fetch_sub(&out, (long long)before);
    return given(after);
}

void free(void *block) {
    taken_back(block);
    __libc_free(block);
}
