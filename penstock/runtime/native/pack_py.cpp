// Packs lists of records as msgpack, in one pass that also finds out whether msgpack keeps the types of the records.
// codec.py says what this is used for. The packed objects lie all over the heap, so the pass prefetches each object
// some time before it reads it.
//
// No Python code runs here, so no list or dict can change while it is read.
#include "module.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "hash.hpp"

namespace {

// The kind of a list. A list's code is its kind, and for tuples their arity in the bits above it. codec.py has the same
// numbers.
enum Kind : int { other = 0, text = 1, scalars = 2, tuples = 3, nested = 4, map = 5 };
constexpr int kKindBits = 3;
constexpr Py_ssize_t kArityMost = 255;
// Values that are deeper, or cyclic, are pickled. The limit is low because each level may multiply parts that are
// shared.
constexpr int kDepthMost = 8;
constexpr Py_ssize_t kAhead = 12;  // how many objects ahead to prefetch: about as many as memory loads at a time
constexpr std::size_t kLengthMost = std::numeric_limits<std::uint32_t>::max();  // msgpack's
constexpr std::size_t kHeaderMost = 9;  // the most bytes of a value's header, or of a number

void ask_for(PyObject *object) noexcept {
    __builtin_prefetch(object);
    __builtin_prefetch(reinterpret_cast<char *>(object) + 48);  // where the text of a short string begins
}

// A bytes object that grows.
class Out {
  public:
    explicit Out(std::size_t size) noexcept : bytes_(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size))) {
        if (bytes_ == nullptr) return;
        at_ = begin();
        end_ = at_ + size;
    }
    Out(const Out &) = delete;
    Out &operator=(const Out &) = delete;
    ~Out() { Py_XDECREF(bytes_); }

    // Makes room for `size` more bytes. Returns false with a MemoryError.
    bool room(std::size_t size) noexcept {
        if (bytes_ != nullptr && std::size_t(end_ - at_) >= size) [[likely]]
            return true;
        if (bytes_ == nullptr) return false;
        const std::size_t used = std::size_t(at_ - begin()), wanted = 2 * (used + size);
        if (_PyBytes_Resize(&bytes_, Py_ssize_t(wanted)) < 0) return false;
        at_ = begin() + used;
        end_ = begin() + wanted;
        return true;
    }

    // The functions that follow write into room that `room` has made.
    void put(unsigned byte) noexcept { *at_++ = char(byte); }
    template <class Number>
    void put(unsigned byte, Number number) noexcept {  // big-endian
        *at_++ = char(byte);
        for (int shift = 8 * int(sizeof number) - 8; shift >= 0; shift -= 8) *at_++ = char(number >> shift);
    }
    void put(const void *data, std::size_t size) noexcept {
        std::memcpy(at_, data, size);
        at_ += size;
    }
    char *at() noexcept { return at_; }
    void advance_to(char *at) noexcept { at_ = at; }
    char *end() noexcept { return end_; }
    std::size_t used() noexcept { return std::size_t(at_ - begin()); }
    // Begin a list or a map before the number of its entries is known, and write the number afterwards.
    void begin_counted(unsigned code) noexcept { put(code, std::uint32_t{0}); }
    void say_count(std::uint32_t count) noexcept {
        for (int i = 0; i < 4; ++i) begin()[1 + i] = char(count >> (24 - 8 * i));
    }

    // Returns the bytes object, or null with a MemoryError.
    PyObject *finish() noexcept {
        if (bytes_ != nullptr) _PyBytes_Resize(&bytes_, Py_ssize_t(at_ - begin()));
        return std::exchange(bytes_, nullptr);
    }

  private:
    char *begin() noexcept { return PyBytes_AS_STRING(bytes_); }
    PyObject *bytes_;
    char *at_ = nullptr, *end_ = nullptr;
};

// Copies without a call of memcpy, for short texts, which most keys are. Reads nothing outside of the data.
inline void copy(char *to, const void *data, std::size_t size) noexcept {
    const auto *from = static_cast<const char *>(data);
    const auto ends = [=](std::size_t part) {
        std::memcpy(to, from, part);
        std::memcpy(to + size - part, from + size - part, part);
    };
    if (size > 32) {  // one memcpy of a size that is known to be small would be compiled to slow string instructions
        for (std::size_t done = 0; done + 16 < size; done += 16) std::memcpy(to + done, from + done, 16);
        std::memcpy(to + size - 16, from + size - 16, 16);
    } else if (size >= 16) {
        ends(16);
    } else if (size >= 8) {
        ends(8);
    } else if (size >= 4) {
        ends(4);
    } else if (size > 0) {
        to[0] = from[0];
        to[size / 2] = from[size / 2];
        to[size - 1] = from[size - 1];
    }
}

// Writes a short ASCII text or a small int, and returns the end of what was written. Returns null when the object is
// neither, or might not fit before `end`. Sets `is_text`. The function takes pointers instead of an `Out`, because to
// the compiler each byte written through an `Out` might change the `Out` itself.
inline char *put_quickly(char *at, char *end, PyObject *object, bool &is_text) noexcept {
    PyTypeObject *type = Py_TYPE(object);
    is_text = type == &PyUnicode_Type;
    if (is_text) {
        if (!PyUnicode_IS_COMPACT_ASCII(object)) return nullptr;
        const Py_ssize_t length = PyUnicode_GET_LENGTH(object);
        if (length > 0xff || length + 2 > end - at) return nullptr;
        if (length >= 32) *at++ = char(0xd9);
        *at++ = char(length < 32 ? 0xa0 | length : length);
        copy(at, PyUnicode_1BYTE_DATA(object), std::size_t(length));
        return at + length;
    }
    if (end - at < 5) return nullptr;
    if (type != &PyLong_Type) return nullptr;
#if PY_VERSION_HEX >= 0x030c0000
    if (!PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject *>(object))) return nullptr;
    const Py_ssize_t value = PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject *>(object));
#else
    const Py_ssize_t size = Py_SIZE(object);
    if (size != 0 && size != 1) return nullptr;
    const Py_ssize_t value = size == 0 ? 0 : Py_ssize_t(reinterpret_cast<PyLongObject *>(object)->ob_digit[0]);
#endif
    if (value < 0) return nullptr;
    if (value < 128) {
        *at++ = char(value);
    } else if (value <= 0xffff) {
        *at++ = char(0xcd);
        *at++ = char(value >> 8);
        *at++ = char(value);
    } else {
        *at++ = char(0xce);
        for (int shift = 24; shift >= 0; shift -= 8) *at++ = char(value >> shift);
    }
    return at;
}

// Each function below that returns bool returns false when msgpack cannot represent the value, or would not keep its
// type, and also with a MemoryError.

bool put_length(Out &out, std::size_t length, unsigned fix, unsigned fix_most, unsigned code16) {
    if (length > kLengthMost || !out.room(kHeaderMost)) return false;
    if (length <= fix_most) out.put(fix | unsigned(length));
    else if (length <= 0xffff) out.put(code16, std::uint16_t(length));
    else out.put(code16 + 1, std::uint32_t(length));
    return true;
}
bool put_list(Out &out, Py_ssize_t size) { return put_length(out, std::size_t(size), 0x90, 15, 0xdc); }
bool put_map(Out &out, Py_ssize_t size) { return put_length(out, std::size_t(size), 0x80, 15, 0xde); }

// Writes the header of a text or of bytes, and makes room for up to `most` bytes after it.
bool put_text_header(Out &out, std::size_t most, bool is_text, std::size_t exact) {
    if (most > kLengthMost || !out.room(kHeaderMost + most)) return false;
    if (is_text && most < 32) out.put(0xa0 | unsigned(exact));
    else if (most <= 0xff) out.put(is_text ? 0xd9 : 0xc4, std::uint8_t(exact));
    else if (most <= 0xffff) out.put(is_text ? 0xda : 0xc5, std::uint16_t(exact));
    else out.put(is_text ? 0xdb : 0xc6, std::uint32_t(exact));
    return true;
}

template <class Unit>
bool put_wide(Out &out, const Unit *units, std::size_t length) {
    std::size_t size = 0;
    for (std::size_t i = 0; i < length; ++i) {
        const std::uint32_t c = units[i];
        if ((c & ~std::uint32_t{0x7ff}) == 0xd800) return false;  // a lone surrogate: UTF-8 has none
        size += c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    }
    if (!put_text_header(out, size, true, size)) return false;
    auto *at = reinterpret_cast<unsigned char *>(out.at());
    out.advance_to(reinterpret_cast<char *>(penstock::encode_utf8(units, length, at)));
    return true;
}

bool put_text(Out &out, PyObject *object) {
#if PY_VERSION_HEX < 0x030c0000
    if (!PyUnicode_IS_READY(object)) return false;  // a form of text that current code does not create
#endif
    const auto length = std::size_t(PyUnicode_GET_LENGTH(object));
    const void *data = PyUnicode_DATA(object);
    if (PyUnicode_IS_ASCII(object)) [[likely]] {
        if (!put_text_header(out, length, true, length)) return false;
        out.put(data, length);
        return true;
    }
    switch (PyUnicode_KIND(object)) {
        case PyUnicode_1BYTE_KIND: return put_wide(out, static_cast<const Py_UCS1 *>(data), length);
        case PyUnicode_2BYTE_KIND: return put_wide(out, static_cast<const Py_UCS2 *>(data), length);
        default: return put_wide(out, static_cast<const Py_UCS4 *>(data), length);
    }
}

bool put_int(Out &out, PyObject *object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (!out.room(kHeaderMost) || overflow < 0) return false;
    if (overflow > 0) {
        const unsigned long long large = PyLong_AsUnsignedLongLong(object);
        if (large == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred()) {
            PyErr_Clear();
            return false;
        }
        out.put(0xcf, std::uint64_t(large));
    } else if (value >= -32 && value < 128) {
        out.put(unsigned(value) & 0xff);
    } else if (value >= 0) {
        if (value <= 0xff) out.put(0xcc, std::uint8_t(value));
        else if (value <= 0xffff) out.put(0xcd, std::uint16_t(value));
        else if (value <= 0xffffffff) out.put(0xce, std::uint32_t(value));
        else out.put(0xcf, std::uint64_t(value));
    } else {
        if (value >= INT8_MIN) out.put(0xd0, std::uint8_t(value));
        else if (value >= INT16_MIN) out.put(0xd1, std::uint16_t(value));
        else if (value >= INT32_MIN) out.put(0xd2, std::uint32_t(value));
        else out.put(0xd3, std::uint64_t(value));
    }
    return true;
}

// Writes a scalar that is not a text.
bool put_scalar(Out &out, PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    if (type == &PyLong_Type) return put_int(out, object);
    if (type == &PyFloat_Type) {
        if (!out.room(kHeaderMost)) return false;
        out.put(0xcb, std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(object)));
    } else if (type == &PyBytes_Type) {
        const auto size = std::size_t(PyBytes_GET_SIZE(object));
        if (!put_text_header(out, size, false, size)) return false;
        out.put(PyBytes_AS_STRING(object), size);
    } else if (object == Py_None || type == &PyBool_Type) {
        if (!out.room(1)) return false;
        out.put(object == Py_None ? 0xc0 : object == Py_True ? 0xc3 : 0xc2);
    } else {
        return false;
    }
    return true;
}

// Writes a scalar, or a list or a dict (with texts as keys) whose values are of these types too. Raises `kind` to the
// kind of a list that has this value.
bool put_value(Out &out, PyObject *object, int depth, Kind &kind) {
    if (PyUnicode_CheckExact(object)) return put_text(out, object);
    const bool is_list = PyList_CheckExact(object);
    if (!is_list && !PyDict_CheckExact(object)) {
        kind = std::max(kind, scalars);
        return put_scalar(out, object);
    }
    kind = nested;
    if (depth == kDepthMost) return false;
    if (is_list) {
        const Py_ssize_t size = PyList_GET_SIZE(object);
        if (!put_list(out, size)) return false;
        for (Py_ssize_t i = 0; i < size; ++i) {
            if (!put_value(out, PyList_GET_ITEM(object, i), depth + 1, kind)) return false;
        }
        return true;
    }
    if (!put_map(out, PyDict_GET_SIZE(object))) return false;
    Py_ssize_t place = 0;
    PyObject *key, *value;
    while (PyDict_Next(object, &place, &key, &value)) {
        if (!PyUnicode_CheckExact(key) || !put_text(out, key) || !put_value(out, value, depth + 1, kind)) return false;
    }
    return true;
}

// Writes the records of a list, in several calls, and determines the list's code.
class Records {
  public:
    bool add(Out &out, PyObject *const *items, Py_ssize_t size) {
        if (arity_ == unknown && size > 0) {
            arity_ = PyTuple_CheckExact(items[0]) ? PyTuple_GET_SIZE(items[0]) : no_tuples;
            if (arity_ == 0 || arity_ > kArityMost) return false;
        }
        return arity_ == no_tuples ? add_values(out, items, size) : add_tuples(out, items, size);
    }
    int code() const noexcept { return arity_ > 0 ? tuples | int(arity_) << kKindBits : int(kind_); }

  private:
    static constexpr Py_ssize_t unknown = -1, no_tuples = -2;

    bool add_values(Out &out, PyObject *const *items, Py_ssize_t size) {
        for (Py_ssize_t i = 0; i < size;) {
            char *at = out.at(), *const end = out.end();
            bool only_texts = true;
            for (; i < size; ++i) {
                if (i + kAhead < size) ask_for(items[i + kAhead]);
                bool is_text;
                char *next = put_quickly(at, end, items[i], is_text);
                if (next == nullptr) break;
                only_texts = only_texts && is_text;
                at = next;
            }
            out.advance_to(at);
            if (!only_texts) kind_ = std::max(kind_, scalars);
            if (i < size && !put_value(out, items[i++], 0, kind_)) return false;
        }
        return true;
    }

    bool add_tuples(Out &out, PyObject *const *items, Py_ssize_t size) {
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject *record = items[i];
            if (!PyTuple_CheckExact(record) || PyTuple_GET_SIZE(record) != arity_) return false;
            if (!put_list(out, arity_)) return false;
            for (Py_ssize_t f = 0; f < arity_; ++f) {
                PyObject *field = PyTuple_GET_ITEM(record, f);
                bool is_text;
                if (char *at = put_quickly(out.at(), out.end(), field, is_text)) out.advance_to(at);
                else if (!put_value(out, field, 0, kind_)) return false;
            }
        }
        return true;
    }

    Py_ssize_t arity_ = unknown;
    Kind kind_ = text;
};

// The keys or the values of a dict of any class, up to kMost at a time. Uses an iterator, because PyDict_Next takes
// several times as long. Objects that are held stay in the processor's caches, and their loads overlap.
class Some {
  public:
    static constexpr Py_ssize_t kMost = 128;

    static Some keys(PyObject *entries) { return Some(PyDict_Type.tp_iter(entries)); }
    static Some values(PyObject *entries) {
        PyObject *view = PyObject_CallMethod(reinterpret_cast<PyObject *>(&PyDict_Type), "values", "O", entries);
        PyObject *iterator = view == nullptr ? nullptr : PyObject_GetIter(view);
        Py_XDECREF(view);
        return Some(iterator);
    }
    Some(const Some &) = delete;
    Some &operator=(const Some &) = delete;
    ~Some() {
        let_go();
        Py_XDECREF(iterator_);
    }

    // Releases the objects that are held, and holds the next ones. Returns their number: 0 at the end, or with an
    // exception.
    Py_ssize_t next() noexcept {
        let_go();
        if (iterator_ == nullptr) return 0;
        const auto following = Py_TYPE(iterator_)->tp_iternext;
        while (size_ < kMost && (items_[size_] = following(iterator_)) != nullptr) ++size_;
        return size_;
    }
    PyObject *const *items() const noexcept { return items_; }

  private:
    explicit Some(PyObject *iterator) noexcept : iterator_(iterator) {}
    void let_go() noexcept {  // the dict still has the objects, so none is freed
        while (size_ > 0) Py_DECREF(items_[--size_]);
    }
    PyObject *iterator_, *items_[kMost];
    Py_ssize_t size_ = 0;
};

bool put_some_entries(Out &out, PyObject *const *keys, PyObject *const *values, Py_ssize_t size) {
    Kind kind = text;
    for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject *key = keys[i], *value = values[i];
        bool is_text;
        if (char *at = put_quickly(out.at(), out.end(), key, is_text)) {
            if ((at = put_quickly(at, out.end(), value, is_text)) != nullptr) {
                out.advance_to(at);
                continue;
            }
        }
        if (!(PyUnicode_CheckExact(key) ? put_text(out, key) : put_scalar(out, key))) return false;
        if (!put_value(out, value, 0, kind)) return false;
    }
    return true;
}

// Estimates the packed size of a record of a list, from some of the records. Without an estimate the output would grow
// by doubling, which for texts costs as much as packing.
std::size_t estimate(PyObject *const *items, Py_ssize_t size) {
    constexpr Py_ssize_t kLooks = 8;
    const Py_ssize_t step = std::max<Py_ssize_t>(1, size / kLooks);
    std::size_t seen = 0, bytes = 0;
    for (Py_ssize_t i = step / 2; i < size; i += step, ++seen) {
        PyObject *record = items[i];
        bytes += PyUnicode_CheckExact(record) ? std::size_t(PyUnicode_GET_LENGTH(record)) + 3
                 : PyTuple_CheckExact(record) ? 12 * std::size_t(PyTuple_GET_SIZE(record)) + 1
                                              : 6;
    }
    return seen == 0 ? 0 : bytes * 9 / 8 / seen + 1;
}

// Returns the result of `pack`, or null with an exception.
PyObject *packed(Out &out, int code) {
    if (PyErr_Occurred()) return nullptr;
    if (code == other) Py_RETURN_NONE;
    PyObject *bytes = out.finish();
    return bytes == nullptr ? nullptr : Py_BuildValue("(iN)", code, bytes);
}

PyObject *packed_items(PyObject *const *items, Py_ssize_t size) {
    Out out(64 + estimate(items, size) * std::size_t(size));
    Records list;
    const bool put = put_list(out, size) && list.add(out, items, size);
    return packed(out, put ? list.code() : other);
}

PyObject *pack(PyObject *, PyObject *records) {
    if (!PyList_Check(records)) {
        return PyErr_Format(PyExc_TypeError, "records must be a list, not %.100s", Py_TYPE(records)->tp_name);
    }
    return packed_items(reinterpret_cast<PyListObject *>(records)->ob_item, PyList_GET_SIZE(records));
}

PyObject *pack_part(PyObject *, PyObject *arguments) {
    PyObject *records;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(arguments, "O!nn", &PyList_Type, &records, &begin, &end)) return nullptr;
    end = std::clamp<Py_ssize_t>(end, 0, PyList_GET_SIZE(records));
    begin = std::clamp<Py_ssize_t>(begin, 0, end);
    return packed_items(reinterpret_cast<PyListObject *>(records)->ob_item + begin, end - begin);
}

// Adds the result of `packed` to a list. Returns false with an exception, or when the result is None.
bool append_packed(PyObject *frames, Out &out, int code) {
    PyObject *frame = packed(out, code);
    const bool added = frame != nullptr && frame != Py_None && PyList_Append(frames, frame) == 0;
    Py_XDECREF(frame);
    return added;
}

// Parses the arguments of both functions below: a dict, and the number of bytes at which a frame is full.
bool frame_arguments(PyObject *arguments, PyObject *&entries, std::size_t &full) {
    Py_ssize_t most;
    if (!PyArg_ParseTuple(arguments, "O!n", &PyDict_Type, &entries, &most)) return false;
    full = std::size_t(std::clamp<Py_ssize_t>(most, 1, Py_ssize_t{1} << 30));  // so a count of entries fits
    return true;
}

// Returns a list of frames, which `make(frames)` adds, or None when msgpack would not keep the types.
template <class Make>
PyObject *in_frames(Make make) {
    PyObject *frames = PyList_New(0);
    if (frames == nullptr || make(frames)) return frames;
    Py_DECREF(frames);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

// Returns how many of `size` entries to add before checking again whether the frame is full, estimated from the size of
// the entries so far.
Py_ssize_t at_once(Out &out, Py_ssize_t count, std::size_t full, Py_ssize_t size) noexcept {
    constexpr Py_ssize_t kFirst = 8;
    const Py_ssize_t fit = count == 0 ? kFirst : Py_ssize_t((full - out.used()) / (out.used() / std::size_t(count) + 1));
    return std::clamp<Py_ssize_t>(fit, 1, size);
}

PyObject *pack_frames(PyObject *, PyObject *arguments) {
    PyObject *entries;
    std::size_t full;
    if (!frame_arguments(arguments, entries, full)) return nullptr;
    return in_frames([&](PyObject *frames) {
        Some keys = Some::keys(entries), values = Some::values(entries);
        Py_ssize_t left = PyDict_GET_SIZE(entries), size = std::min(keys.next(), values.next()), done = 0;
        while (size > 0) {
            Out out(std::min(full + full / 8, 20 * std::size_t(left)) + 64);
            if (!out.room(kHeaderMost)) return false;
            out.begin_counted(0xdf);
            Py_ssize_t count = 0;
            do {  // at least once: even a frame that its header fills must have an entry
                const Py_ssize_t some = at_once(out, count, full, size - done);
                if (!put_some_entries(out, keys.items() + done, values.items() + done, some)) return false;
                count += some;
                if ((done += some) == size) {
                    size = std::min(keys.next(), values.next());
                    done = 0;
                }
            } while (size > 0 && out.used() < full);
            left -= count;
            out.say_count(std::uint32_t(count));
            if (!append_packed(frames, out, map)) return false;
        }
        return !PyErr_Occurred();
    });
}

PyObject *pack_value_frames(PyObject *, PyObject *arguments) {
    PyObject *entries;
    std::size_t full;
    if (!frame_arguments(arguments, entries, full)) return nullptr;
    return in_frames([&](PyObject *frames) {
        Some values = Some::values(entries);
        Py_ssize_t left = PyDict_GET_SIZE(entries), size = values.next(), done = 0;
        while (size > 0) {
            const std::size_t each = estimate(values.items() + done, size - done);
            Out out(std::min(full + full / 8, each * std::size_t(left)) + 64);
            if (!out.room(kHeaderMost)) return false;
            out.begin_counted(0xdd);
            Records list;
            Py_ssize_t count = 0;
            do {
                const Py_ssize_t some = at_once(out, count, full, size - done);
                if (!list.add(out, values.items() + done, some)) return false;
                count += some;
                if ((done += some) == size) {
                    size = values.next();
                    done = 0;
                }
            } while (size > 0 && out.used() < full);
            left -= count;
            out.say_count(std::uint32_t(count));
            if (!append_packed(frames, out, list.code())) return false;
        }
        return !PyErr_Occurred();
    });
}

}  // namespace

void bind_pack(nanobind::module_ &m) {
    static PyMethodDef methods[] = {
        {"pack", pack, METH_O,
         PyDoc_STR("pack(records) -> (code, msgpack) or None\n\n"
                   "Packs a list as msgpack. Returns a code for the types of all records: 1 all str, 2 scalars,\n"
                   "3 tuples of one arity of scalars or nested values (plus 8 times the arity), 4 nested lists and\n"
                   "dicts. Returns None when msgpack would not keep the types.")},
        {"pack_part", pack_part, METH_VARARGS,
         PyDoc_STR("pack_part(records, begin, end) -> (code, msgpack) or None\n\n"
                   "Packs records[begin:end] as `pack` does.")},
        {"pack_frames", pack_frames, METH_VARARGS,
         PyDoc_STR("pack_frames(entries, full) -> [(code, msgpack)] or None\n\n"
                   "Packs a dict from scalars to nested values as several dicts of code 5, in the dict's order. Each of\n"
                   "them ends soon after `full` bytes.")},
        {"pack_value_frames", pack_value_frames, METH_VARARGS,
         PyDoc_STR("pack_value_frames(entries, full) -> [(code, msgpack)] or None\n\n"
                   "Packs the values of a dict as several lists, in the dict's order. Each of them ends soon after `full`\n"
                   "bytes.")},
        {nullptr, nullptr, 0, nullptr},
    };
    if (PyModule_AddFunctions(m.ptr(), methods) < 0) nanobind::raise_python_error();
}
