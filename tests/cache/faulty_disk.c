/* A disk that fails, hangs, or takes the process with it: preloaded before libc, for one directory.
 *
 * Counts every call that changes something below `directory` (or asks for its free space), and at the n-th of
 * them does what it was armed for. Calls by the thread that armed it are counted apart as well.
 *
 * HANG alone is about reads: none below `directory` returns until the disk is disarmed.
 *
 * Of one file that is watched, it notes how long it was when it was last synced: a power failure may take what
 * was appended since then.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT = 0, KILL = 1, TEAR = 2, FAIL = 3, SLOW = 4, HANG = 5 };

static char directory[4096];
static atomic_int mode = COUNT, armed = 0;
static atomic_long from = 0, until = 0, seen = 0, seen_here = 0;
static int failure = EIO;
static long delay_us = 0, home = 0;

/* Do `what` at the calls from `first` up to, not including, `end`, counted from 1. */
void faults_arm(const char *where, int what, long first, long end, int code, long delay) {
    armed = 0;
    snprintf(directory, sizeof directory, "%s", where);
    mode = what;
    from = first;
    until = end;
    failure = code;
    delay_us = delay;
    seen = 0;
    seen_here = 0;
    home = syscall(SYS_gettid);
    armed = 1;
}

long faults_disarm(void) { armed = 0; return seen; }

long faults_seen_here(void) { return seen_here; }

static char watched[4096];
static atomic_long synced = 0;

void faults_watch(const char *path) {
    snprintf(watched, sizeof watched, "%s", path);
    synced = 0;
}

long faults_synced(void) { return synced; }

static int below(const char *path) {
    size_t length = strlen(directory);
    return armed && path != NULL && strncmp(path, directory, length) == 0
        && (path[length] == '/' || path[length] == '\0');
}

/* Find the path of an open file; an empty one if it has none. */
static char *path_of(int fd, char path[4096]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, 4095);
    path[length < 0 ? 0 : length] = '\0';
    return path;
}

static int fd_below(int fd) {
    char path[4096];
    return armed && below(path_of(fd, path));
}

static int note_synced(int fd) {
    char path[4096];
    struct stat found;
    if (armed && strcmp(path_of(fd, path), watched) == 0 && fstat(fd, &found) == 0) synced = found.st_size;
    return 0;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Count a call, and say whether it is to fail (1) or to be torn in the middle (2): only a write can be. */
static int struck(int is_write) {
    if (mode == TEAR && !is_write) return 0;
    long n = ++seen;
    if (syscall(SYS_gettid) == home) seen_here++;
    if (n < from || n >= until) return 0;
    switch (mode) {
    case KILL: die();
    case TEAR: return 2;
    case FAIL: errno = failure; return 1;
    case SLOW: usleep(delay_us); return 0;
    default: return 0;
    }
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

#define WRITES(name, type, declaration, half, whole)                  \
    type name declaration {                                           \
        REAL(name);                                                   \
        int how = fd_below(fd) ? struck(1) : 0;                       \
        if (how == 1) return -1;                                      \
        if (how == 2) { if (half < 0) {} die(); }                     \
        return whole;                                                 \
    }

#define CHANGES(name, type, declaration, is_below, whole)             \
    type name declaration {                                           \
        REAL(name);                                                   \
        int how = (is_below) ? struck(0) : 0;                          \
        if (how == 1) return -1;                                      \
        return whole;                                                 \
    }

WRITES(write, ssize_t, (int fd, const void *data, size_t n), real(fd, data, n / 2), real(fd, data, n))
WRITES(pwrite, ssize_t, (int fd, const void *data, size_t n, off_t at), real(fd, data, n / 2, at),
       real(fd, data, n, at))
WRITES(pwrite64, ssize_t, (int fd, const void *data, size_t n, off64_t at), real(fd, data, n / 2, at),
       real(fd, data, n, at))
WRITES(writev, ssize_t, (int fd, const struct iovec *parts, int n), real(fd, parts, n / 2), real(fd, parts, n))
CHANGES(fsync, int, (int fd), fd_below(fd), real(fd) || note_synced(fd) ? -1 : 0)
CHANGES(fdatasync, int, (int fd), fd_below(fd), real(fd) || note_synced(fd) ? -1 : 0)
CHANGES(ftruncate, int, (int fd, off_t n), fd_below(fd), real(fd, n))
CHANGES(ftruncate64, int, (int fd, off64_t n), fd_below(fd), real(fd, n))
CHANGES(rename, int, (const char *one, const char *other), below(one), real(one, other))
CHANGES(unlink, int, (const char *path), below(path), real(path))
CHANGES(mkdir, int, (const char *path, mode_t bits), below(path), real(path, bits))
CHANGES(statvfs, int, (const char *path, struct statvfs *found), below(path), real(path, found))
CHANGES(statvfs64, int, (const char *path, struct statvfs64 *found), below(path), real(path, found))

#define READS(name, declaration, whole)                               \
    ssize_t name declaration {                                        \
        REAL(name);                                                   \
        if (armed && mode == HANG && fd_below(fd)) {                  \
            seen++;                                                   \
            while (armed) usleep(1000);                               \
        }                                                             \
        return whole;                                                 \
    }

READS(read, (int fd, void *data, size_t n), real(fd, data, n))
READS(readv, (int fd, const struct iovec *parts, int n), real(fd, parts, n))

#define OPENS(name)                                                   \
    int name(const char *path, int flags, ...) {                      \
        REAL(name);                                                   \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        mode_t bits = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0;   \
        va_end(rest);                                                 \
        int how = (flags & O_CREAT) && below(path) ? struck(0) : 0;    \
        if (how == 1) return -1;                                      \
        return real(path, flags, bits);                               \
    }

OPENS(open)
OPENS(open64)
