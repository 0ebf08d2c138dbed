/* Makes writes, syncs and renames below one folder fail, for tests: LD_PRELOAD this library.
 *
 * TILTYARD_FAULTS names a file that holds the struct below; test_disk_faults.py maps it too, sets what shall happen and
 * reads what did. A disk that gets full takes half of the bytes, and refuses the next write. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

struct control {
    uint32_t armed;    /* whether calls are counted */
    uint32_t skip;     /* calls that work before the first that fails */
    uint32_t left;     /* calls that still fail */
    uint32_t chance;   /* of failing, in 1/256 */
    uint32_t random;   /* state of the generator */
    uint32_t cut;      /* the error of the next write, after one that took half of its bytes */
    uint32_t calls;    /* out: calls below the folder */
    uint32_t injected; /* out: calls that failed */
    char folder[512];
};

static const int errors[] = {EIO, ESTALE, ENOSPC, EDQUOT};
static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("TILTYARD_FAULTS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) control = memory;
    close(file);
}

static uint32_t draw(void) {
    uint32_t x = control->random;
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    return control->random = x;
}

/* The error for this call, or 0. */
static int fault_at(const char *path) {
    if (strncmp(path, control->folder, strlen(control->folder)) != 0) return 0;
    uint32_t call = __sync_add_and_fetch(&control->calls, 1);
    if (call <= control->skip || control->left == 0) return 0;
    /* the first call fails for certain, so that every try has a fault */
    if (control->injected > 0 && (draw() & 255) >= control->chance) return 0;
    return errors[draw() % 4];
}

static int fault_of(int fd) {
    if (!control || !control->armed) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fault_at(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_IF(error) do { int found = (error); if (found) return fail(found); } while (0)

static int fail(int error) {
    __sync_sub_and_fetch(&control->left, 1);
    __sync_add_and_fetch(&control->injected, 1);
    errno = error;
    return -1;
}

ssize_t write(int fd, const void *data, size_t size) {
    int error = fault_of(fd);
    if (error && control->cut) error = control->cut, control->cut = 0;
    else if ((error == ENOSPC || error == EDQUOT) && size > 1) {
        control->cut = error;
        return REAL(write)(fd, data, size / 2);
    }
    FAIL_IF(error);
    return REAL(write)(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t place) {
    FAIL_IF(fault_of(fd));
    return REAL(pwrite64)(fd, data, size, place);
}

int fsync(int fd) {
    FAIL_IF(fault_of(fd));
    return REAL(fsync)(fd);
}

int rename(const char *from, const char *to) {
    if (control && control->armed) FAIL_IF(fault_at(to));
    return REAL(rename)(from, to);
}
