// The memory of a ring: a file without a name in a memory-backed directory, which all processes that use the ring map.
// The file never has a name (O_TMPFILE), so that nothing remains however the processes end: the kernel frees it with
// the last descriptor and mapping. Another process reaches it through /proc/<pid>/fd/<n> of any process that has it
// open.
#pragma once

#include <bit>
#include <stdexcept>
#include <string>

#include "ring.hpp"

namespace penstock {

// `kind` is the name of the Python class to raise.
struct RingFault : std::runtime_error {
    RingFault(const char *kind, const std::string &what) : std::runtime_error(what), kind(kind) {}
    const char *kind;
};

class Segment {
  public:
    static Segment create(uint64_t capacity, uint64_t slots, const std::string &directory) {
        if (!std::has_single_bit(capacity) || capacity < kMinCapacity || capacity > kMaxCapacity)
            throw RingFault("RingError", "a ring's capacity must be a power of two from " + std::to_string(kMinCapacity) +
                            " to " + std::to_string(kMaxCapacity) + " bytes, not " + std::to_string(capacity) +
                            "; recommended_capacity(message_bytes) gives one");
        if (!std::has_single_bit(slots) || slots < kMinSlots || slots > kMaxSlots)
            throw RingFault("RingError", "a ring's slots must be a power of two from " + std::to_string(kMinSlots) +
                            " to " + std::to_string(kMaxSlots) + ", not " + std::to_string(slots));
        Segment s;
        s.fd_ = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        if (s.fd_ < 0)
            throw RingFault("RingError", "cannot make a nameless file in " + directory + ": " + std::strerror(errno) +
                            "; the directory must exist, be writable, and lie in memory (tmpfs)");
        s.bytes_ = segment_bytes(capacity, slots);
        // All memory is claimed now. Otherwise a full file system would end a process by SIGBUS in the middle of a
        // write.
        int error;
        while ((error = posix_fallocate(s.fd_, 0, off_t(s.bytes_))) == EINTR) {}
        if (error == ENOSPC || error == ENOMEM) {
            struct statvfs v{};
            fstatvfs(s.fd_, &v);
            throw RingFault("RingNoSpace", "a ring of " + std::to_string(capacity) + " bytes takes " +
                            std::to_string(s.bytes_) + " bytes of shared memory; " + directory + " has " +
                            std::to_string(uint64_t(v.f_bavail) * v.f_frsize) + " free of " +
                            std::to_string(uint64_t(v.f_blocks) * v.f_frsize) +
                            ": choose a smaller capacity (ring_bytes of a job), or enlarge the shared memory "
                            "(mount -o remount,size=..., or the container's --shm-size)");
        }
        if (error != 0)
            throw RingFault("RingError", "cannot claim " + std::to_string(s.bytes_) + " bytes in " + directory + ": " +
                            std::strerror(error));
        s.map();
        initialise(*s.control_, capacity, slots);
        return s;
    }

    static Segment attach(const std::string &address) {
        Segment s;
        // The descriptor may be any other file by now. O_NONBLOCK: we must not wait for the other end of a pipe.
        s.fd_ = ::open(address.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
        if (s.fd_ < 0) {
            if (errno == EACCES || errno == EPERM)
                throw RingFault("RingError", "not allowed to open the ring at " + address +
                                ": both processes must run as the same user");
            throw RingFault("RingGone", "no ring at " + address + ": " + std::strerror(errno) +
                            "; its holder has closed it or ended: use the address of another holder");
        }
        struct stat st{};
        if (fstat(s.fd_, &st) != 0 || !S_ISREG(st.st_mode) || size_t(st.st_size) < sizeof(Control))
            throw no_ring(address);
        s.bytes_ = size_t(st.st_size);
        s.map();
        const Control &c = *s.control_;
        if (c.magic != kMagic) throw no_ring(address);
        if (c.layout != kLayout || c.unit != kUnit)
            throw RingFault("RingError", "the ring at " + address + " has layout " + std::to_string(c.layout) +
                            ", this process speaks " + std::to_string(kLayout) +
                            ": both ends need the same release of Penstock");
        if (c.segment_bytes != s.bytes_ || segment_bytes(c.capacity, c.slots) != s.bytes_)
            throw RingFault("RingError", "the ring at " + address + " is damaged: its file has " +
                            std::to_string(s.bytes_) + " bytes, its head says " + std::to_string(c.segment_bytes) +
                            ": make a new ring");
        if (c.pid_namespace != os::pid_namespace())
            throw RingFault("RingError", "the ring at " + address +
                            " was made in another pid namespace (container), where pids mean other processes: "
                            "processes that share a ring must share that too");
        return s;
    }

    Segment(Segment &&o) noexcept
        : fd_(std::exchange(o.fd_, -1)), bytes_(o.bytes_), control_(std::exchange(o.control_, nullptr)) {}
    Segment &operator=(Segment &&) = delete;
    ~Segment() {
        if (control_) munmap(control_, bytes_);
        close_file();
    }

    // Ends the segment's address in this process. The memory stays mapped.
    void close_file() {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

    int fd() const { return fd_; }
    Control &control() const { return *control_; }

  private:
    Segment() = default;

    static RingFault no_ring(const std::string &address) {
        return RingFault("RingGone", address + " is not a ring, or not any more: its holder has closed it or ended; "
                         "use the address of another holder");
    }

    void map() {
        constexpr size_t kPopulate = size_t(64) << 20;  // let page faults happen here, not in the first lap
        void *p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | (bytes_ <= kPopulate ? MAP_POPULATE : 0),
                       fd_, 0);
        if (p == MAP_FAILED)
            throw RingFault("RingError", "cannot map " + std::to_string(bytes_) + " bytes of shared memory: " +
                            std::strerror(errno));
        control_ = static_cast<Control *>(p);
    }

    int fd_ = -1;
    size_t bytes_ = 0;
    Control *control_ = nullptr;
};

}  // namespace penstock
