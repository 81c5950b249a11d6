// The ring's classes for Python: handles that own a share of the mapping, buffers in and out, and waiting without the
// GIL. Everything that changes a Producer or Consumer runs with the GIL, so that several threads may use one handle.
// Only sleeping releases the GIL.
#include "module.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <pthread.h>

#include <memory>
#include <optional>

#include "ring_segment.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {
namespace {

constexpr uint64_t kWriterSlice = 50'000'000;      // how long a writer sleeps before it asks whether the consumer lives
constexpr uint32_t kMostPerDrain = 1u << 20;

// The number of forks up to this process. A handle keeps the number at which it was made, so that a copy of it in a
// child process can be told from the child's own handles. (getpid() would cost a system call each time.)
unsigned forks = 0;

[[noreturn]] void raise(const char *kind, const std::string &what) {
    nb::object type = nb::module_::import_("penstock.runtime.transport.ring").attr(kind);
    PyErr_SetString(type.ptr(), what.c_str());
    throw nb::python_error();
}

template <class Make>
auto or_raise(Make &&make) {
    try {
        return make();
    } catch (const RingFault &f) {
        raise(f.kind, f.what());
    }
}

std::shared_ptr<Segment> share(Segment &&s) { return std::make_shared<Segment>(std::move(s)); }

// Base of all handles: has the handle's share of the segment, and knows whether this process has made the handle.
struct Handle {
    explicit Handle(std::shared_ptr<Segment> s) : segment(std::move(s)), born(forks) {}

    bool usable() const { return segment && born == forks; }
    bool mine() const { return born == forks; }
    void check(const char *what) const {
        if (usable()) [[likely]]
            return;
        if (!mine())
            raise("RingForked", std::string("this ") + what +
                  " was made before a fork and belongs to the parent process: in the child, attach to the ring's "
                  "address and make a new one");
        raise("RingClosed", std::string("this ") + what + " is closed");
    }

    std::shared_ptr<Segment> segment;
    unsigned born;
};

struct Deadline {
    explicit Deadline(std::optional<double> seconds) {
        if (seconds && !(*seconds >= 0)) throw nb::value_error("timeout must be None or a number of seconds >= 0");
        if (seconds && *seconds < 1e9) at = os::now_ns() + uint64_t(*seconds * 1e9);
    }
    uint64_t left() const {
        if (at == UINT64_MAX) return UINT64_MAX;
        const uint64_t now = os::now_ns();
        return at > now ? at - now : 0;
    }
    uint64_t at = UINT64_MAX;
};

// The bytes of any contiguous object. Those of `bytes` are read without the buffer protocol, which is faster.
class View {
  public:
    explicit View(nb::handle h) {
        if (PyBytes_CheckExact(h.ptr())) [[likely]] {
            data = PyBytes_AS_STRING(h.ptr());
            size = size_t(PyBytes_GET_SIZE(h.ptr()));
            return;
        }
        if (PyObject_GetBuffer(h.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
        data = buffer_.buf;
        size = size_t(buffer_.len);
    }
    View(View &&o) noexcept : data(o.data), size(o.size), buffer_(o.buffer_) { o.buffer_.obj = nullptr; }
    View(const View &) = delete;
    ~View() {
        if (buffer_.obj) PyBuffer_Release(&buffer_);
    }
    const void *data;
    size_t size;

  private:
    Py_buffer buffer_{};
};

// The bytes of a tuple or list of buffers, which stay valid while this object exists.
class Views {
  public:
    explicit Views(nb::handle sequence)
        : items_(nb::steal(PySequence_Fast(sequence.ptr(), "expected a sequence of bytes-like objects"))) {
        if (!items_.is_valid()) throw nb::python_error();
        const Py_ssize_t n = PySequence_Fast_GET_SIZE(items_.ptr());
        views.reserve(size_t(n));
        for (Py_ssize_t i = 0; i < n; ++i) {
            views.emplace_back(PySequence_Fast_GET_ITEM(items_.ptr(), i));
            total += views.back().size;
        }
    }
    std::vector<View> views;
    size_t total = 0;

  private:
    nb::object items_;
};

// ---- Producer -------------------------------------------------------------------------------------------

class PyProducer : public Handle {
  public:
    PyProducer(std::shared_ptr<Segment> s, os::Identity self) : Handle(std::move(s)) {
        if (!core_.attach(segment->control(), self))
            raise("RingBusy", "all " + std::to_string(kMaxProducers) +
                  " producer places of this ring are taken by living processes: close one, or share one");
        most_ = std::min<uint64_t>(segment->control().max_message(), UINT32_MAX);
    }
    ~PyProducer() { close(); }

    void close() {
        if (usable()) core_.detach();
        if (mine()) segment.reset();
    }

    bool try_write(uint32_t target, nb::handle payload) {
        check("producer");
        View v(payload);
        check_size(v.size);
        return put(target, v);
    }

    void write(uint32_t target, nb::handle payload, std::optional<double> timeout) {
        check("producer");
        View v(payload);
        check_size(v.size);
        if (put(target, v)) [[likely]]
            return;
        until_written(v.size, timeout, [&] { return put(target, v); });
    }

    bool try_write_parts(uint32_t target, nb::handle parts) {
        check("producer");
        Views v(parts);
        check_size(v.total);
        return put_parts(target, v);
    }

    void write_parts(uint32_t target, nb::handle parts, std::optional<double> timeout) {
        check("producer");
        Views v(parts);
        check_size(v.total);
        until_written(v.total, timeout, [&] { return put_parts(target, v); });
    }

  private:
    void check_size(size_t size) const {
        if (size <= most_) [[likely]]
            return;
        uint64_t enough = kMinCapacity;
        while (enough < kMaxCapacity && enough / 2 < size) enough *= 2;
        raise("MessageTooLarge", "a message of " + std::to_string(size) + " bytes can never fit: this ring of " +
              std::to_string(segment->control().capacity) + " bytes takes messages up to " + std::to_string(most_) +
              "; make the ring with capacity=" + std::to_string(enough) + " or more, or split the message");
    }

    bool put(uint32_t target, const View &v) {
        return core_.try_put(target, uint32_t(v.size), [&](std::byte *to) {
            if (v.size) std::memcpy(to, v.data, v.size);
        });
    }

    bool put_parts(uint32_t target, const Views &v) {
        return core_.try_put(target, uint32_t(v.total), [&](std::byte *to) {
            for (const View &part : v.views) {
                if (part.size) std::memcpy(to, part.data, part.size);
                to += part.size;
            }
        });
    }

    template <class Put>
    void until_written(size_t size, std::optional<double> timeout, Put &&put) {
        const Deadline deadline(timeout);
        while (!put())
            if (!sleep_for_room(size, deadline))
                raise("RingFull", "no room for a message of " + std::to_string(size) + " bytes within " +
                      std::to_string(*timeout) + " s: the consumer is slower than the ring's producers; wait longer, "
                      "or use a larger ring than " + std::to_string(segment->control().capacity) + " bytes");
    }

    // Waits for room. Returns false when the time is up.
    bool sleep_for_room(size_t size, const Deadline &deadline) {
        const uint64_t left = deadline.left();
        if (left == 0) return false;
        const std::shared_ptr<Segment> keep = segment;  // another thread may close this handle meanwhile
        const uint64_t slept_at = os::now_ns();
        {
            nb::gil_scoped_release without_gil;
            core_.wait_for_room(uint32_t(size), std::min(left, kWriterSlice));
        }
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        check("producer");
        if (os::now_ns() - slept_at >= std::min(left, kWriterSlice) && core_.consumer_died()) {
            const os::Identity id = segment->control().consumer.load(std::memory_order_relaxed);
            raise("ConsumerDied", "the ring is full and its consumer, process " + std::to_string(os::pid_of(id)) +
                  ", has died: what is in the ring is kept for the consumer that attaches next; write again when it has");
        }
        return true;
    }

    Producer core_;
    uint64_t most_ = 0;
};

// ---- Consumer and the messages it lends -----------------------------------------------------------------

class PyConsumer : public Handle {
  public:
    PyConsumer(std::shared_ptr<Segment> s, os::Identity self, uint32_t read_ahead, Wait wait, uint64_t zero_copy_min)
        : Handle(std::move(s)), zero_copy_min_(zero_copy_min) {
        if (const os::Identity holder = core_.attach(segment->control(), self, read_ahead, wait)) {
            const std::string pid = std::to_string(os::pid_of(holder));
            raise("RingBusy", "this ring is being read by process " + pid +
                  ", and a ring has one consumer: close that one, or end its process");
        }
        attached_ = true;
    }
    ~PyConsumer() { let_go(); }

    void close() {
        if (!segment) return;
        if (mine() && inside_)
            raise("RingBusy", "another thread is inside this consumer's drain(): wake it with Ring.wake() first");
        if (mine() && exports > 0) {
            PyErr_Format(PyExc_BufferError, "%zu views of messages in the ring are still in use: release them first",
                         exports);
            throw nb::python_error();
        }
        let_go();
    }

    nb::object drain(uint32_t most, std::optional<double> timeout);

    void release() {
        check("consumer");
        core_.release_copies();
    }

    void give_back(Seq seq) {
        if (usable()) core_.release_held(seq);
    }

    nb::list skips();

    size_t exports = 0;

  private:
    void let_go() {
        if (attached_ && usable()) core_.detach();
        attached_ = false;
        if (mine()) segment.reset();
    }

    nb::object hand_over(size_t n);

    Consumer core_;
    bool attached_ = false, inside_ = false;
    uint64_t zero_copy_min_;
    std::vector<Taken> taken_;
};

// A large message that Python reads where it lies in the ring. Its slot is released by release(), or when the object is
// deleted.
class Message {
  public:
    Message(nb::object keep, PyConsumer &owner, const Taken &t) : keep_(std::move(keep)), owner_(&owner), taken_(t) {}
    Message(const Message &) = delete;
    ~Message() {
        if (!released_) owner_->give_back(taken_.seq);
    }

    bool readable() const { return !released_ && owner_->usable(); }
    size_t size() const { return taken_.length; }

    void release() {
        if (exports_ > 0) {
            PyErr_Format(PyExc_BufferError, "%zu views of this message are still in use: release them first", exports_);
            throw nb::python_error();
        }
        if (!std::exchange(released_, true)) owner_->give_back(taken_.seq);
    }

    static int get_buffer(PyObject *self, Py_buffer *view, int flags) noexcept {
        Message *m = nb::inst_ptr<Message>(self);
        view->obj = nullptr;
        if (!m->readable()) {
            PyErr_SetString(PyExc_BufferError, "this message cannot be read any more: it was released, or its consumer was "
                            "closed, or belongs to another process");
            return -1;
        }
        void *data = const_cast<std::byte *>(m->taken_.data);
        if (PyBuffer_FillInfo(view, self, data, Py_ssize_t(m->taken_.length), 1, flags) != 0) return -1;
        ++m->exports_;
        ++m->owner_->exports;
        return 0;
    }

    static void release_buffer(PyObject *self, Py_buffer *) noexcept {
        Message *m = nb::inst_ptr<Message>(self);
        --m->exports_;
        --m->owner_->exports;
    }

  private:
    nb::object keep_;
    PyConsumer *owner_;
    Taken taken_;
    size_t exports_ = 0;
    bool released_ = false;
};

nb::object PyConsumer::hand_over(size_t n) {
    PyObject *list = PyList_New(Py_ssize_t(n));
    bool ok = list != nullptr;
    for (size_t i = 0; ok && i < n; ++i) {
        const Taken &t = taken_[i];
        PyObject *payload;
        if (t.length >= zero_copy_min_) [[unlikely]] {
            try {
                core_.hold(t.seq);
                payload = nb::cast(new Message(nb::find(*this), *this, t), nb::rv_policy::take_ownership).release().ptr();
            } catch (const std::exception &) {
                payload = nullptr;
            }
        } else {
            payload = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(t.data), Py_ssize_t(t.length));
        }
        PyObject *target = payload ? PyLong_FromUnsignedLong(t.target) : nullptr;
        PyObject *pair = target ? PyTuple_New(2) : nullptr;
        if (!pair) {
            Py_XDECREF(payload);
            Py_XDECREF(target);
            ok = false;
            break;
        }
        PyTuple_SET_ITEM(pair, 0, target);
        PyTuple_SET_ITEM(pair, 1, payload);
        if (PyBytes_CheckExact(payload)) PyObject_GC_UnTrack(pair);  // cannot be part of a cycle
        PyList_SET_ITEM(list, Py_ssize_t(i), pair);
    }
    if (ok) return nb::steal(list);
    // Out of memory. The messages that were taken have not reached the caller, and the next drain() would release them.
    // So this consumer ends here, and the ring's next consumer gets them again.
    Py_XDECREF(list);
    let_go();
    if (!PyErr_Occurred()) PyErr_NoMemory();
    throw nb::python_error();
}

nb::object PyConsumer::drain(uint32_t most, std::optional<double> timeout) {
    check("consumer");
    if (inside_)
        raise("RingBusy", "another thread is inside this consumer's drain(): a consumer is for one thread at a time");
    most = std::clamp<uint32_t>(most, 1, kMostPerDrain);
    if (taken_.size() < most) taken_.resize(most);
    size_t n = 0;
    // Looks for messages. Returns true when there is something to return to the caller, or skips() has news.
    auto look = [&] {
        core_.release_copies();
        const size_t skips = core_.skips_waiting();
        n = core_.collect({taken_.data(), most});
        if (n > 0 || core_.skips_waiting() > skips) return true;
        core_.release_copies();  // we may have passed a flush, and a writer may be waiting for its room
        return false;
    };
    const bool may_wait = !(timeout && *timeout == 0);
    if (may_wait) {
        core_.release_copies();
        core_.gather();
    }
    if (!look() && may_wait) {
        const Deadline deadline(timeout);
        const std::shared_ptr<Segment> keep = segment;
        do {
            const uint64_t left = deadline.left();
            if (left == 0 || core_.called()) break;
            inside_ = true;
            {
                nb::gil_scoped_release without_gil;
                core_.wait(left);
            }
            inside_ = false;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            check("consumer");
        } while (!look());
    }
    core_.called();
    return hand_over(n);
}

struct Skip {
    uint32_t seq;
    int producer_pid;
    uint64_t bytes;
};

nb::list PyConsumer::skips() {
    check("consumer");
    nb::list out;
    for (const Skipped &s : core_.take_skips()) out.append(nb::cast(Skip{s.seq, s.pid, s.bytes}));
    return out;
}

// ---- Ring -----------------------------------------------------------------------------------------------

class PyRing : public Handle {
  public:
    explicit PyRing(Segment &&s) : Handle(share(std::move(s))), pid_(getpid()), fd_(segment->fd()), self_(os::self_identity()) {
        if (self_ == 0)
            raise("RingError", "cannot read /proc/self/stat, which tells the users of a ring who is alive: mount /proc");
    }
    ~PyRing() { close(); }

    void close() {
        if (!mine() || !segment) return;
        segment->close_file();
        segment.reset();
    }

    std::string address() const {
        if (!segment) check("ring");  // a handle that came through a fork may still tell the parent's address
        return "/proc/" + std::to_string(pid_) + "/fd/" + std::to_string(fd_);
    }

    Control &control() const {
        check("ring");
        return segment->control();
    }

    PyProducer *producer() const {
        check("ring");
        return new PyProducer(segment, self_);
    }

    PyConsumer *consumer(double max_spin_us, bool adaptive, uint32_t read_ahead, uint64_t zero_copy_min) const {
        check("ring");
        // With one core, a consumer that looks only keeps the producer waiting.
        static const bool alone = sysconf(_SC_NPROCESSORS_ONLN) == 1;
        const Wait wait{alone ? 0 : uint64_t(max_spin_us * 1000), adaptive};
        return new PyConsumer(segment, self_, read_ahead, wait, zero_copy_min);
    }

    nb::dict stats() const {
        Control &c = control();
        uint64_t written = 0, bytes = 0, flushes = 0, alive = 0;
        for (const Cell &cell : c.cells) {
            written += cell.messages.load(std::memory_order_relaxed);
            bytes += cell.bytes.load(std::memory_order_relaxed);
            flushes += cell.flushes.load(std::memory_order_relaxed);
            const os::Identity id = cell.identity.load(std::memory_order_acquire);
            alive += id != 0 && !is_dead(id);
        }
        const os::Identity reader = c.consumer.load(std::memory_order_acquire);
        const Descriptor released = Descriptor::unpack(c.released.load(std::memory_order_acquire));
        const Descriptor reserved = Descriptor::unpack(c.reserved.load(std::memory_order_acquire));
        nb::dict d;
        d["written"] = written;
        d["bytes"] = bytes;
        d["delivered"] = c.delivered.load(std::memory_order_relaxed);
        d["flushes"] = flushes;
        d["skips"] = c.skips.load(std::memory_order_relaxed);
        d["stalled"] = c.stalled.load(std::memory_order_relaxed);
        d["used_bytes"] = ((reserved.pos - released.pos) & kPosMask) * kUnit;
        d["used_slots"] = distance(released.seq, reserved.seq);
        d["producers"] = alive;
        d["consumer_pid"] = reader != 0 && !is_dead(reader) ? nb::cast(os::pid_of(reader)) : nb::none();
        return d;
    }

  private:
    int pid_, fd_;
    os::Identity self_;
};

// ---- the two calls that are made for each message, without nanobind's dispatch, which takes half of their time ----

uint32_t target_of(PyObject *o) {
    const unsigned long v = PyLong_AsUnsignedLong(o);
    if (v == (unsigned long)-1 && PyErr_Occurred()) throw nb::python_error();
    if (v > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a target must be below 2**32");
        throw nb::python_error();
    }
    return uint32_t(v);
}

template <class Body>
PyObject *guarded(Body &&body) noexcept {
    try {
        return body();
    } catch (nb::python_error &e) {
        e.restore();
    } catch (const nb::builtin_exception &e) {
        PyErr_SetString(e.type() == nb::exception_type::value_error ? PyExc_ValueError : PyExc_TypeError, e.what());
    } catch (const std::exception &e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
}

PyObject *hot_try_write(PyObject *self, PyObject *const *args, Py_ssize_t n) noexcept {
    return guarded([&]() -> PyObject * {
        if (n != 2) throw nb::type_error("try_write() takes two arguments, target and payload");
        return PyBool_FromLong(nb::inst_ptr<PyProducer>(self)->try_write(target_of(args[0]), args[1]));
    });
}

PyObject *hot_write(PyObject *self, PyObject *const *args, Py_ssize_t n, PyObject *names) noexcept {
    return guarded([&]() -> PyObject * {
        const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
        if (n < 2 || n + named > 3 ||
            (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout") != 0))
            throw nb::type_error("write() takes target, payload and timeout=None");
        std::optional<double> timeout;
        if (n + named == 3 && args[2] != Py_None) {
            timeout = PyFloat_AsDouble(args[2]);
            if (PyErr_Occurred()) throw nb::python_error();
        }
        nb::inst_ptr<PyProducer>(self)->write(target_of(args[0]), args[1], timeout);
        Py_RETURN_NONE;
    });
}

PyMethodDef hot_methods[] = {
    {"try_write", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(hot_try_write)), METH_FASTCALL,
     "try_write($self, target, payload, /)\n--\n\n"
     "Write one message if there is room now. Returns False, and writes nothing, if there is not."},
    {"write", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(hot_write)), METH_FASTCALL | METH_KEYWORDS,
     "write($self, target, payload, /, timeout=None)\n--\n\n"
     "Write one message, and wait for room. Raises RingFull after `timeout` seconds, and ConsumerDied."},
};

void add_hot_methods(nb::handle type) {
    for (PyMethodDef &def : hot_methods) {
        nb::object method = nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject *>(type.ptr()), &def));
        if (!method.is_valid()) throw nb::python_error();
        type.attr(def.ml_name) = method;
    }
}

}  // namespace
}  // namespace penstock

void bind_ring(nb::module_ &m) {
    using namespace penstock;
    pthread_atfork(nullptr, nullptr, [] { ++forks; });

    auto producer = nb::class_<PyProducer>(m, "Producer", "Writes messages into a ring. Made by Ring.producer().");
    add_hot_methods(producer);
    producer
        .def("try_write_parts", &PyProducer::try_write_parts, "target"_a, "parts"_a,
             nb::sig("def try_write_parts(self, target: int, parts: collections.abc.Sequence[typing_extensions.Buffer]) -> bool"),
             "Like try_write, with the payload gathered from several buffers, in one copy.")
        .def("write_parts", &PyProducer::write_parts, "target"_a, "parts"_a, "timeout"_a = nb::none(),
             nb::sig("def write_parts(self, target: int, parts: collections.abc.Sequence[typing_extensions.Buffer], "
                     "timeout: float | None = None) -> None"),
             "Like write, with the payload gathered from several buffers.")
        .def("close", &PyProducer::close, "Give up the producer's place in the ring.")
        .def("__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Producer"))
        .def("__exit__", [](PyProducer &p, nb::args) { p.close(); }, nb::sig("def __exit__(self, *exc: object) -> None"));

    PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void *>(Message::get_buffer)},
                                  {Py_bf_releasebuffer, reinterpret_cast<void *>(Message::release_buffer)},
                                  {0, nullptr}};
    nb::class_<Message>(m, "Message", nb::type_slots(buffer_slots),
                        "A large message where it lies in the ring, read-only. It keeps its room in the ring until "
                        "release(), or until nothing refers to it. Messages may be released in any order.")
        .def("view", [](nb::handle self) { return nb::steal(PyMemoryView_FromObject(self.ptr())); },
             nb::sig("def view(self) -> memoryview"), "Returns the payload, without a copy. Release the view before the message.")
        .def("release", &Message::release,
             "Give the message's room back to the ring. Raises BufferError while views of it are in use.")
        .def("__len__", &Message::size);

    nb::class_<Skip>(m, "Skip", "A slot that was given up, because its producer died while it wrote the message.")
        .def_ro("seq", &Skip::seq)
        .def_ro("producer_pid", &Skip::producer_pid)
        .def_ro("bytes", &Skip::bytes)
        .def("__repr__", [](const Skip &s) {
            return "Skip(seq=" + std::to_string(s.seq) + ", producer_pid=" + std::to_string(s.producer_pid) +
                   ", bytes=" + std::to_string(s.bytes) + ")";
        });

    nb::class_<PyConsumer>(m, "Consumer",
                           "Reads a ring's messages. Made by Ring.consumer(); a ring has one consumer at a time.")
        .def("drain", &PyConsumer::drain, "max_messages"_a = 1024, "timeout"_a = 0.0,
             nb::sig("def drain(self, max_messages: int = 1024, timeout: float | None = 0.0) "
                     "-> list[tuple[int, bytes | Message]]"),
             "Returns the messages that have come, as (target, payload). Releases the messages that the call before\n"
             "returned as bytes.\n\n"
             "Waits up to `timeout` seconds (None: without limit) for the first message. An empty list means that the\n"
             "time is up, that Ring.wake() was called, or that skips() has news.")
        .def("release", &PyConsumer::release,
             "Release all messages that were drained as bytes, so that no later consumer gets them again.")
        .def("skips", &PyConsumer::skips, nb::sig("def skips(self) -> list[Skip]"),
             "Returns the slots that were given up since the last call.")
        .def("close", &PyConsumer::close, "Leave the ring. The next consumer gets again what was drained and not released.")
        .def("__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Consumer"))
        .def("__exit__", [](PyConsumer &c, nb::args) { c.close(); }, nb::sig("def __exit__(self, *exc: object) -> None"));

    nb::class_<PyRing>(m, "RingHandle",
                       "A share of a ring's memory. The class Ring of penstock.runtime.transport.ring wraps it.")
        .def_static("create", [](uint64_t capacity, uint64_t slots, const std::string &directory) {
            return or_raise([&] { return new PyRing(Segment::create(capacity, slots, directory)); });
        }, "capacity"_a, "slots"_a, "directory"_a)
        .def_static("attach", [](const std::string &address) {
            return or_raise([&] { return new PyRing(Segment::attach(address)); });
        }, "address"_a)
        .def_prop_ro("address", &PyRing::address)
        .def_prop_ro("capacity", [](const PyRing &r) { return r.control().capacity; })
        .def_prop_ro("slots", [](const PyRing &r) { return r.control().slots; })
        .def_prop_ro("max_message", [](const PyRing &r) { return std::min<uint64_t>(r.control().max_message(), UINT32_MAX); })
        .def("producer", &PyRing::producer)
        .def("consumer", &PyRing::consumer, "max_spin_us"_a, "adaptive"_a, "read_ahead"_a, "zero_copy_min"_a)
        .def("wake", [](const PyRing &r) { call_consumer(r.control()); })
        .def("stats", &PyRing::stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
        .def("close", &PyRing::close);
}
