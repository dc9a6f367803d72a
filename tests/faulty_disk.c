/* A library for LD_PRELOAD: below some folders, fails the n-th call that reads or writes.
 *
 *   gcc -shared -fPIC -O2 -o faulty_disk.so faulty_disk.c -ldl
 *
 * FAULT_ROOTS holds the folders, separated by colons. faulty_disk_arm(kind, at, error, repeat) counts from 0 again and
 * fails call number `at` (from 1; 0: none) of kind 'r' or 'w' with `error`; with `repeat` every later call of the kind too.
 * faulty_disk_log(path) writes a line for each counted call: its kind, its function and the file.
 *
 * Read-like calls: open and fopen for reading, read, pread, readv, fread, mmap for reading, opendir.
 * Write-like calls: open and fopen for writing, write, pwrite, writev, fwrite, fflush, fclose of a written file, fsync,
 * fdatasync, rename, mkdir, ftruncate, unlink of nothing (removing frees space, so it never fails here), shared mmap.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 4096
static char *names[FILES]; /* the path behind a descriptor below the roots; NULL for others */
static char kind = 0;
static long at = 0, seen[2] = {0, 0};
static int error_number = 0, repeat = 0, log_file = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
    static __typeof__(&name) real = NULL; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int below(const char *path) {
    const char *roots = getenv("FAULT_ROOTS");
    if (!roots || !path) return 0;
    char whole[4096];
    if (path[0] != '/') {
        if (syscall(SYS_getcwd, whole, sizeof whole) <= 0) return 0;
        size_t length = strlen(whole);
        if (length + strlen(path) + 2 > sizeof whole) return 0;
        whole[length] = '/';
        strcpy(whole + length + 1, path);
        path = whole;
    }
    while (*roots) {
        size_t length = strcspn(roots, ":");
        if (length && !strncmp(path, roots, length) && (path[length] == '/' || !path[length])) return 1;
        roots += length + (roots[length] == ':');
    }
    return 0;
}

/* Whether this call is to fail; errno is set then. */
static int fails(char mine, const char *function, const char *path) {
    pthread_mutex_lock(&lock);
    long number = ++seen[mine == 'w'];
    int hit = kind == mine && at && (number == at || (repeat && number > at));
    if (log_file >= 0) {
        char line[4600];
        int size = snprintf(line, sizeof line, "%c\t%ld\t%s\t%s\n", mine, number, function, path);
        syscall(SYS_write, log_file, line, size);
    }
    pthread_mutex_unlock(&lock);
    if (hit) errno = error_number;
    return hit;
}

void faulty_disk_arm(int mine, long number, int error, int again) {
    pthread_mutex_lock(&lock);
    kind = (char)mine, at = number, error_number = error, repeat = again;
    seen[0] = seen[1] = 0;
    pthread_mutex_unlock(&lock);
}

void faulty_disk_log(const char *path) {
    log_file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
}

static const char *name_of(int descriptor) {
    return descriptor >= 0 && descriptor < FILES ? names[descriptor] : NULL;
}

static void remember(int descriptor, const char *path) {
    if (descriptor < 0 || descriptor >= FILES) return;
    free(names[descriptor]);
    names[descriptor] = path && below(path) ? strdup(path) : NULL;
}

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (below(path) && fails(writes(flags) ? 'w' : 'r', "open", path)) return -1; \
        int found = real(path, flags, mode); \
        remember(found, path); \
        return found; \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        int ours = folder == AT_FDCWD || path[0] == '/'; \
        if (ours && below(path) && fails(writes(flags) ? 'w' : 'r', "openat", path)) return -1; \
        int found = real(folder, path, flags, mode); \
        remember(found, ours ? path : NULL); \
        return found; \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        int mine = strpbrk(mode, "wa+") ? 'w' : 'r'; \
        if (below(path) && fails(mine, "fopen", path)) return NULL; \
        FILE *found = real(path, mode); \
        if (found) remember(fileno(found), path); \
        return found; \
    }
FOPEN(fopen)
FOPEN(fopen64)

int close(int descriptor) {
    REAL(close);
    remember(descriptor, NULL);
    return real(descriptor);
}

#define DESCRIPTOR(type, name, mine, parameters, arguments) \
    type name parameters { \
        REAL(name); \
        const char *path = name_of(descriptor); \
        if (path && fails(mine, #name, path)) return (type)-1; \
        return real arguments; \
    }
DESCRIPTOR(ssize_t, read, 'r', (int descriptor, void *buffer, size_t size), (descriptor, buffer, size))
DESCRIPTOR(ssize_t, readv, 'r', (int descriptor, const struct iovec *parts, int count), (descriptor, parts, count))
DESCRIPTOR(ssize_t, pread, 'r', (int descriptor, void *b, size_t size, off_t place), (descriptor, b, size, place))
DESCRIPTOR(ssize_t, pread64, 'r', (int descriptor, void *b, size_t size, off64_t place), (descriptor, b, size, place))
DESCRIPTOR(ssize_t, write, 'w', (int descriptor, const void *buffer, size_t size), (descriptor, buffer, size))
DESCRIPTOR(ssize_t, writev, 'w', (int descriptor, const struct iovec *parts, int count), (descriptor, parts, count))
DESCRIPTOR(ssize_t, pwrite, 'w', (int descriptor, const void *b, size_t size, off_t at_), (descriptor, b, size, at_))
DESCRIPTOR(ssize_t, pwrite64, 'w', (int descriptor, const void *b, size_t size, off64_t at_), (descriptor, b, size, at_))
DESCRIPTOR(int, fsync, 'w', (int descriptor), (descriptor))
DESCRIPTOR(int, fdatasync, 'w', (int descriptor), (descriptor))
DESCRIPTOR(int, ftruncate, 'w', (int descriptor, off_t size), (descriptor, size))
DESCRIPTOR(int, ftruncate64, 'w', (int descriptor, off64_t size), (descriptor, size))

#define MMAP(name, offset) \
    void *name(void *address, size_t size, int protection, int flags, int descriptor, offset place) { \
        REAL(name); \
        const char *path = flags & MAP_ANONYMOUS ? NULL : name_of(descriptor); \
        int mine = (flags & MAP_SHARED) && (protection & PROT_WRITE) ? 'w' : 'r'; \
        if (path && fails(mine, "mmap", path)) return MAP_FAILED; \
        return real(address, size, protection, flags, descriptor, place); \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

size_t fread(void *buffer, size_t size, size_t count, FILE *file) {
    REAL(fread);
    const char *path = name_of(fileno(file));
    if (path && fails('r', "fread", path)) return 0;
    return real(buffer, size, count, file);
}

size_t fwrite(const void *buffer, size_t size, size_t count, FILE *file) {
    REAL(fwrite);
    const char *path = name_of(fileno(file));
    if (path && fails('w', "fwrite", path)) return 0;
    return real(buffer, size, count, file);
}

int fclose(FILE *file) {
    REAL(fclose);
    int descriptor = fileno(file);
    const char *path = name_of(descriptor);
    int mode = path ? fcntl(descriptor, F_GETFL) & O_ACCMODE : O_RDONLY;
    int hit = path && mode != O_RDONLY && fails('w', "fclose", path);
    remember(descriptor, NULL);
    int found = real(file);
    if (hit) errno = error_number;
    return hit ? EOF : found;
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (below(to) && fails('w', "rename", to)) return -1;
    return real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    if (to_folder == AT_FDCWD && below(to) && fails('w', "rename", to)) return -1;
    return real(from_folder, from, to_folder, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    if (below(path) && fails('w', "mkdir", path)) return -1;
    return real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    if (folder == AT_FDCWD && below(path) && fails('w', "mkdir", path)) return -1;
    return real(folder, path, mode);
}

DIR *opendir(const char *path) {
    REAL(opendir);
    if (below(path) && fails('r', "opendir", path)) return NULL;
    return real(path);
}
