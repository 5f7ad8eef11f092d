/* Preloaded into a process: fails chosen calls of the C library, like a broken store.
 *
 * `fail_calls` sets which, from then on; `failed_calls` returns how many have failed since.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static char wanted[32], below[PATH_MAX], containing[256];
static int number, first, times, late, seen, failed;

void fail_calls(const char *call, const char *root, const char *part, int error, int nth, int count,
                int after) {
    pthread_mutex_lock(&lock);
    snprintf(wanted, sizeof wanted, "%s", call);
    snprintf(below, sizeof below, "%s/", root);
    snprintf(containing, sizeof containing, "%s", part);
    number = error, first = nth, times = count, late = after, seen = failed = 0;
    pthread_mutex_unlock(&lock);
}

int failed_calls(void) {
    pthread_mutex_lock(&lock);
    int count = failed;
    pthread_mutex_unlock(&lock);
    return count;
}

/* The path of `name` in the folder `fd`, or of `fd` without a name. */
static void locate(int fd, const char *name, char *out) {
    char link[64];
    out[0] = 0;
    if (name && name[0] == '/') {
        snprintf(out, PATH_MAX, "%s", name);
        return;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length > 0 ? length : 0] = 0;
    strncat(out, "/", PATH_MAX - 1 - strlen(out));
    if (name)
        strncat(out, name, PATH_MAX - 1 - strlen(out));
}

/* 0: continue; 1: fail instead of the call; 2: fail after it. */
static int verdict(const char *call, int fd, const char *name) {
    char path[PATH_MAX];
    int answer = 0;
    pthread_mutex_lock(&lock);
    if (!strcmp(call, wanted)) {
        locate(fd, name, path);
        if (!strncmp(path, below, strlen(below)) && strstr(path, containing)) {
            seen++;
            if (seen >= first && seen < first + times) {
                failed++;
                answer = late ? 2 : 1;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) \
        real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define CARRY(type, call, fd, path, expression) \
    do { \
        int broken = verdict(call, fd, path); \
        type result = -1; \
        if (broken != 1) \
            result = expression; \
        if (broken) { \
            errno = number; \
            result = -1; \
        } \
        return result; \
    } while (0)

/* CPython calls the variants with flags if they exist. */
#define VECTORED(name, symbol) \
    ssize_t symbol(int fd, const struct iovec *vector, int count, off_t at, int flags) { \
        REAL(ssize_t, #symbol, int, const struct iovec *, int, off_t, int); \
        CARRY(ssize_t, name, fd, NULL, real(fd, vector, count, at, flags)); \
    }
VECTORED("pwritev", pwritev2)
VECTORED("pwritev", pwritev64v2)
VECTORED("preadv", preadv2)
VECTORED("preadv", preadv64v2)

#define PREAD(symbol) \
    ssize_t symbol(int fd, void *data, size_t length, off_t at) { \
        REAL(ssize_t, #symbol, int, void *, size_t, off_t); \
        CARRY(ssize_t, "pread", fd, NULL, real(fd, data, length, at)); \
    }
PREAD(pread)
PREAD(pread64)

ssize_t write(int fd, const void *data, size_t length) {
    REAL(ssize_t, "write", int, const void *, size_t);
    CARRY(ssize_t, "write", fd, NULL, real(fd, data, length));
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    CARRY(int, "fsync", fd, NULL, real(fd));
}

#define TRUNCATE(symbol) \
    int symbol(int fd, off_t length) { \
        REAL(int, #symbol, int, off_t); \
        CARRY(int, "ftruncate", fd, NULL, real(fd, length)); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define OPENAT(symbol) \
    int symbol(int fd, const char *name, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        REAL(int, #symbol, int, const char *, int, ...); \
        CARRY(int, flags & O_CREAT ? "creat" : "openat", fd, name, real(fd, name, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

int mkdirat(int fd, const char *name, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    CARRY(int, "mkdirat", fd, name, real(fd, name, mode));
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    CARRY(int, "linkat", to, new, real(from, old, to, new, flags));
}

int renameat(int from, const char *old, int to, const char *new) {
    REAL(int, "renameat", int, const char *, int, const char *);
    CARRY(int, "renameat", to, new, real(from, old, to, new));
}

int unlinkat(int fd, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    CARRY(int, "unlinkat", fd, name, real(fd, name, flags));
}
