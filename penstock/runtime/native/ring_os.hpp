// What the ring needs from Linux: futexes, a clock, and whether a process is alive.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace penstock::os {

inline uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1'000'000'000u + uint64_t(t.tv_nsec);
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The futexes are the non-private kind: the word lies in memory that several processes map.
inline void futex_wait(std::atomic<uint32_t> &word, uint32_t while_equal, uint64_t ns) {
    static_assert(sizeof(word) == 4 && std::atomic<uint32_t>::is_always_lock_free);
    timespec t{time_t(ns / 1'000'000'000u), long(ns % 1'000'000'000u)};
    syscall(SYS_futex, &word, FUTEX_WAIT, while_equal, &t, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t> &word, int count) {
    syscall(SYS_futex, &word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

// While an object of this class exists, the thread's timers are exact. Otherwise Linux lets them be late by 50
// microseconds.
class ExactTimers {
  public:
    ExactTimers() : slack_(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) { prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0); }
    ~ExactTimers() { prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_), 0, 0, 0); }
    ExactTimers(const ExactTimers &) = delete;
    ExactTimers &operator=(const ExactTimers &) = delete;

  private:
    int slack_;
};

// Identifies a process in one word that can be stored atomically: its pid (below 2^22 on 64-bit Linux) and the clock
// tick at which it started. The tick distinguishes a process from a later one with the same pid.
using Identity = uint64_t;
constexpr int kPidBits = 22;

constexpr int pid_of(Identity id) { return int(id & ((1u << kPidBits) - 1)); }

struct ProcStat {
    char state;
    long threads;
    uint64_t start;
};

enum class Lookup { found, gone, unknown };

inline Lookup read_stat(int pid, ProcStat &out) {
    char path[40], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? Lookup::gone : Lookup::unknown;
    ssize_t n = read(fd, text, sizeof text - 1);
    int read_error = errno;
    close(fd);
    if (n <= 0) return n < 0 && read_error == ESRCH ? Lookup::gone : Lookup::unknown;
    text[n] = 0;
    char *rest = std::strrchr(text, ')');  // the command name may itself hold blanks and brackets
    if (!rest) return Lookup::unknown;
    unsigned long long start;
    if (std::sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
                    &out.state, &out.threads, &start) != 3)
        return Lookup::unknown;
    out.start = start;
    return Lookup::found;
}

inline Identity make_identity(int pid, uint64_t start) { return (start << kPidBits) | Identity(pid); }

inline Identity self_identity() {
    ProcStat s{};
    if (read_stat(getpid(), s) != Lookup::found) return 0;
    return make_identity(getpid(), s.start);
}

// True only when the process can never again run an instruction. In any doubt the process counts as alive, because
// memory that it may still write must not be given to another process. One such doubt is a zombie with other threads:
// its first thread has ended, and the others may still run.
inline bool process_is_dead(Identity id) {
    ProcStat s{};
    switch (read_stat(pid_of(id), s)) {
        case Lookup::gone: return true;
        case Lookup::unknown: return false;
        case Lookup::found: break;
    }
    if (make_identity(pid_of(id), s.start) != id) return true;
    return (s.state == 'Z' || s.state == 'X') && s.threads <= 1;
}

// Pids mean something only inside one pid namespace. Therefore all processes that use a ring must be in the pid
// namespace of its creator.
inline uint64_t pid_namespace() {
    struct stat s;
    return stat("/proc/self/ns/pid", &s) == 0 ? uint64_t(s.st_ino) : 0;
}

}  // namespace penstock::os
