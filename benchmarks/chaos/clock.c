/* A wall clock that can be set: what a process reads of CLOCK_REALTIME, plus the seconds in a file (ATOLL_CHAOS_CLOCK).

   Deadlines of waits on that clock are moved back, as the kernel's own would be if its clock were set. Other clocks
   stay as they are. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define EPOCH 500000000 /* A deadline before 1985 is one of another clock. */

static volatile const long *ahead;

__attribute__((constructor)) static void open_file(void)
{
    const char *path = getenv("ATOLL_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *at = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (at != MAP_FAILED)
        ahead = at;
}

static long offset(void)
{
    return ahead ? *ahead : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*next)(clockid_t, struct timespec *);
    if (!next)
        next = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found))
        return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found))
        return -1;
    if (now)
        *now = found.tv_sec;
    return found.tv_sec;
}

static struct timespec as_kernel(const struct timespec *until)
{
    struct timespec moved = *until;
    if (moved.tv_sec > EPOCH)
        moved.tv_sec -= offset();
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next)
        next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* x86-64 also has an older one */
    if (!next)
        next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moved = as_kernel(until);
    return next(condition, mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*next)(sem_t *, const struct timespec *);
    if (!next)
        next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moved = as_kernel(until);
    return next(semaphore, &moved);
}
