/* malloc, counting: loaded before the C library, it knows how many bytes of large blocks are given out, and the most
   that ever were since `counted_restart`. All threads, whoever asks; glibc only. Built and read by data_memory.py. */

#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <errno.h>

#define LARGE 65536 /* below: Python's objects, not tensors */

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static atomic_long held, most;

static void *given(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    if (size >= LARGE) {
        long now = atomic_fetch_add(&held, (long)size) + (long)size, seen = atomic_load(&most);
        while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now)) {
        }
    }
    return block;
}

static void taken(size_t size) {
    if (size >= LARGE) atomic_fetch_sub(&held, (long)size);
}

void *malloc(size_t size) { return given(__libc_malloc(size)); }
void *calloc(size_t number, size_t size) { return given(__libc_calloc(number, size)); }
void *memalign(size_t alignment, size_t size) { return given(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return given(__libc_memalign(alignment, size)); }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *block = given(__libc_memalign(alignment, size));
    if (!block) return ENOMEM;
    *result = block;
    return 0;
}

void *realloc(void *old, size_t size) {
    size_t before = old ? malloc_usable_size(old) : 0;
    void *block = __libc_realloc(old, size);
    if (block || size == 0) {
        taken(before);
        given(block);
    }
    return block;
}

void free(void *block) {
    if (block) taken(malloc_usable_size(block));
    __libc_free(block);
}

long counted_held(void) { return atomic_load(&held); }
long counted_most(void) { return atomic_load(&most); }
void counted_restart(void) { atomic_store(&most, atomic_load(&held)); }
