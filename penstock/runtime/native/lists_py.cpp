// Work on whole lists of records in one call: stable hashes of keys, and splitting a batch by key. The code uses
// Python's C API directly, because a wrapper's cost for each call or element would be most of the time spent here.
//
// Two rules hold in the whole file. Hashing may run Python code (for the canonical form of a datetime, for example),
// and this code may change the lists that are being read: list sizes are read again after each such call. References
// are borrowed from a list only while no Python code can run.
#include "module.hpp"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "hash.hpp"

namespace {

using penstock::Tag;

static_assert(sizeof(Py_hash_t) == 8, "numeric hashes are those of a 64-bit Python");

// ---- helpers ----

struct Drop {
    void operator()(PyObject *object) const noexcept { Py_XDECREF(object); }
};
// An owned reference, which is dropped at the end of its scope.
using Owned = std::unique_ptr<PyObject, Drop>;

// Room for `size` values: on the stack for a usual batch, and on the heap for a larger one.
template <typename T, std::size_t Near>
class Scratch {
  public:
    explicit Scratch(std::size_t size) noexcept {
        if (size <= Near) {
            data_ = near_.data();
        } else {
            far_.reset(new (std::nothrow) T[size]);
            data_ = far_.get();
            if (data_ == nullptr) PyErr_NoMemory();
        }
    }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    explicit operator bool() const noexcept { return data_ != nullptr; }
    T &operator[](std::size_t i) noexcept { return data_[i]; }
    T *data() noexcept { return data_; }

  private:
    std::array<T, Near> near_;  // left uninitialised: it is written before it is read
    std::unique_ptr<T[]> far_;
    T *data_ = nullptr;
};

// Sets the attribute `index` of the exception that is being raised to the failing key's position. Does nothing if the
// exception takes no attributes.
void mark_index(Py_ssize_t index) {
#if PY_VERSION_HEX >= 0x030c0000
    PyObject *error = PyErr_GetRaisedException();
#else
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
#endif
    if (error != nullptr) {
        const Owned number{PyLong_FromSsize_t(index)};
        if (!number || PyObject_SetAttrString(error, "index", number.get()) < 0) PyErr_Clear();
    }
#if PY_VERSION_HEX >= 0x030c0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(type, error, trace);
#endif
}

bool check_arguments(const char *name, Py_ssize_t got, Py_ssize_t wanted) {
    if (got == wanted) return true;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", name, wanted, got);
    return false;
}

bool check_list(PyObject *object, const char *name) {
    if (PyList_Check(object)) return true;
    PyErr_Format(PyExc_TypeError, "%s must be a list, not %.100s", name, Py_TYPE(object)->tp_name);
    return false;
}

// ---- stable hashes ----

bool hash_object(PyObject *object, std::uint64_t &out);

bool hash_text(PyObject *object, std::uint64_t &out) {
#if PY_VERSION_HEX < 0x030c0000
    if (PyUnicode_READY(object) < 0) return false;
#endif
    const auto length = static_cast<std::size_t>(PyUnicode_GET_LENGTH(object));
    const void *data = PyUnicode_DATA(object);
    if (PyUnicode_IS_ASCII(object)) {
        out = penstock::hash_bytes(data, length, Tag::text);
        return true;
    }
    // PyUnicode_AsUTF8 would fail on lone surrogates, and keep a copy in every key.
    Scratch<unsigned char, 512> utf8(length * penstock::kUtf8Most);
    if (!utf8) return false;
    unsigned char *end = nullptr;
    switch (PyUnicode_KIND(object)) {
        case PyUnicode_1BYTE_KIND:
            end = penstock::encode_utf8(static_cast<const Py_UCS1 *>(data), length, utf8.data());
            break;
        case PyUnicode_2BYTE_KIND:
            end = penstock::encode_utf8(static_cast<const Py_UCS2 *>(data), length, utf8.data());
            break;
        default:
            end = penstock::encode_utf8(static_cast<const Py_UCS4 *>(data), length, utf8.data());
    }
    out = penstock::hash_bytes(utf8.data(), static_cast<std::size_t>(end - utf8.data()), Tag::text);
    return true;
}

// Python's own hash of a number is not randomised and is the same for all equal numbers, of whatever type.
bool hash_number(PyObject *object, hashfunc hash, std::uint64_t &out) {
    const Py_hash_t value = hash(object);
    if (value == -1 && PyErr_Occurred()) return false;
    out = penstock::hash_word(static_cast<std::uint64_t>(value), Tag::number);
    return true;
}

bool hash_tuple(PyObject *object, std::uint64_t &out) {
    if (Py_EnterRecursiveCall(" while hashing a key")) return false;
    penstock::Sequence sequence(Tag::tuple);
    const Py_ssize_t size = PyTuple_GET_SIZE(object);
    bool good = true;
    for (Py_ssize_t i = 0; good && i < size; ++i) {
        std::uint64_t element;
        good = hash_object(PyTuple_GET_ITEM(object, i), element);
        if (good) sequence.add(element);
    }
    Py_LeaveRecursiveCall();
    out = sequence.finish(static_cast<std::size_t>(size));
    return good;
}

bool hash_frozenset(PyObject *object, std::uint64_t &out) {
    const Owned elements{PyObject_GetIter(object)};
    if (!elements || Py_EnterRecursiveCall(" while hashing a key")) return false;
    penstock::Unordered set;
    std::size_t size = 0;
    bool good = true;
    while (good) {
        const Owned element{PyIter_Next(elements.get())};
        if (!element) {
            good = PyErr_Occurred() == nullptr;
            break;
        }
        std::uint64_t hash;
        good = hash_object(element.get(), hash);
        if (good) set.add(hash);
        ++size;
    }
    Py_LeaveRecursiveCall();
    out = set.finish(size);
    return good;
}

// Hashes an object of any other type. Python's `canonical_key` returns a value of the types above, which is equal for
// equal objects, or raises.
bool hash_canonical(PyObject *object, std::uint64_t &out) {
    static PyObject *canonical_key = nullptr;  // a reference that is kept until the process ends
    if (canonical_key == nullptr) {
        const Owned module{PyImport_ImportModule("penstock.runtime.records.key_groups")};
        if (!module) return false;
        canonical_key = PyObject_GetAttrString(module.get(), "canonical_key");
        if (canonical_key == nullptr) return false;
    }
    if (Py_EnterRecursiveCall(" while hashing a key")) return false;
    const Owned stand_in{PyObject_CallOneArg(canonical_key, object)};
    const bool good = stand_in && hash_object(stand_in.get(), out);
    Py_LeaveRecursiveCall();
    return good;
}

// Hashes a key. The caller keeps a reference to `object`. An object of a subclass has the hash of its base class,
// whatever hash the subclass defines, because a string enum equals its string, and a named tuple its tuple.
bool hash_object(PyObject *object, std::uint64_t &out) {
    if (PyUnicode_Check(object)) return hash_text(object, out);
    if (PyLong_Check(object)) return hash_number(object, PyLong_Type.tp_hash, out);
    if (PyTuple_Check(object)) return hash_tuple(object, out);
    if (PyFloat_Check(object)) {
        if (std::isnan(PyFloat_AS_DOUBLE(object))) return hash_canonical(object, out);  // raises
        return hash_number(object, PyFloat_Type.tp_hash, out);
    }
    if (object == Py_None) {
        out = penstock::hash_word(1, Tag::none);
        return true;
    }
    if (PyBytes_Check(object)) {
        const auto size = static_cast<std::size_t>(PyBytes_GET_SIZE(object));
        out = penstock::hash_bytes(PyBytes_AS_STRING(object), size, Tag::bytes);
        return true;
    }
    if (PyFrozenSet_Check(object)) return hash_frozenset(object, out);
    return hash_canonical(object, out);
}

void keys_changed() {
    PyErr_SetString(PyExc_RuntimeError, "the list of keys changed while it was being read");
}

// Calls use(i, hash) for each key until it returns false. Sets the attribute `index` of the exception when a key fails.
template <typename Use>
bool for_each_hash(PyObject *keys, Py_ssize_t size, Use use) {
    for (Py_ssize_t i = 0; i < size; ++i) {
        if (PyList_GET_SIZE(keys) != size) {
            keys_changed();
            return false;
        }
        PyObject *key = Py_NewRef(PyList_GET_ITEM(keys, i));  // hashing may drop the list's own reference
        std::uint64_t hash;
        const bool good = hash_object(key, hash);
        if (!good) mark_index(i);
        Py_DECREF(key);
        if (!good || !use(i, hash)) return false;
    }
    return true;
}

// Computes `hash % groups`, without a division when `groups` is a power of two, as it usually is.
class Modulo {
  public:
    explicit Modulo(std::size_t groups) noexcept
        : groups_(groups), mask_(std::has_single_bit(groups) ? groups - 1 : 0) {}
    std::size_t operator()(std::uint64_t hash) const noexcept {
        return mask_ != 0 ? hash & mask_ : hash % groups_;
    }

  private:
    std::uint64_t groups_, mask_;
};

constexpr std::size_t kGroupsMost = 65536;  // a group and a task fit 16 bits

PyObject *stable_hash(PyObject *, PyObject *key) {
    std::uint64_t hash;
    return hash_object(key, hash) ? PyLong_FromUnsignedLongLong(hash) : nullptr;
}

PyObject *key_groups(PyObject *, PyObject *const *args, Py_ssize_t count) {
    if (!check_arguments("key_groups", count, 2) || !check_list(args[0], "keys")) return nullptr;
    const Py_ssize_t groups = PyLong_AsSsize_t(args[1]);
    if (groups == -1 && PyErr_Occurred()) return nullptr;
    if (groups < 1 || static_cast<std::size_t>(groups) > kGroupsMost) {
        PyErr_Format(PyExc_ValueError, "n_groups is %zd; it must be 1 to %zu", groups, kGroupsMost);
        return nullptr;
    }
    const Modulo modulo(static_cast<std::size_t>(groups));
    const Py_ssize_t size = PyList_GET_SIZE(args[0]);
    Owned result{PyBytes_FromStringAndSize(nullptr, size * 2)};
    if (!result) return nullptr;
    char *out = PyBytes_AS_STRING(result.get());
    const bool good = for_each_hash(args[0], size, [&](Py_ssize_t i, std::uint64_t hash) {
        const auto group = static_cast<std::uint16_t>(modulo(hash));
        std::memcpy(out + i * 2, &group, 2);
        return true;
    });
    return good ? result.release() : nullptr;
}

// ---- partition ----

struct Table {
    Py_buffer view{};
    Table() = default;
    Table(const Table &) = delete;
    Table &operator=(const Table &) = delete;
    ~Table() {
        if (view.obj != nullptr) PyBuffer_Release(&view);
    }
    std::size_t groups() const noexcept { return static_cast<std::size_t>(view.len) / 2; }
    std::uint16_t task(std::size_t group) const noexcept {
        std::uint16_t task;  // the buffer may start at an odd address
        std::memcpy(&task, static_cast<const char *>(view.buf) + group * 2, 2);
        return task;
    }
};

bool same_sizes(PyObject *columns, Py_ssize_t size) {
    for (Py_ssize_t c = 0; c < PyTuple_GET_SIZE(columns); ++c) {
        PyObject *column = PyTuple_GET_ITEM(columns, c);
        if (!check_list(column, "each of columns")) return false;
        if (PyList_GET_SIZE(column) != size) {
            PyErr_Format(PyExc_ValueError, "column %zd has %zd records for %zd keys", c,
                         PyList_GET_SIZE(column), size);
            return false;
        }
    }
    return true;
}

// Hashes each key once, which gives the key's task and the size of each part, creates all lists at their final size,
// and then fills them column by column.
PyObject *partition(PyObject *, PyObject *const *args, Py_ssize_t count) {
    if (!check_arguments("partition", count, 4) || !check_list(args[0], "keys")) return nullptr;
    PyObject *keys = args[0];
    PyObject *columns = args[1];
    if (!PyTuple_Check(columns)) {
        PyErr_Format(PyExc_TypeError, "columns must be a tuple of lists, not %.100s",
                     Py_TYPE(columns)->tp_name);
        return nullptr;
    }
    const Py_ssize_t size = PyList_GET_SIZE(keys);
    if (!same_sizes(columns, size)) return nullptr;

    Table table;
    if (PyObject_GetBuffer(args[2], &table.view, PyBUF_SIMPLE) < 0) return nullptr;
    if (table.view.len % 2 != 0 || table.groups() == 0 || table.groups() > kGroupsMost) {
        PyErr_Format(PyExc_ValueError, "a table of %zd bytes does not hold 1 to %zu 16-bit task numbers",
                     table.view.len, kGroupsMost);
        return nullptr;
    }
    const Py_ssize_t asked = PyLong_AsSsize_t(args[3]);
    if (asked == -1 && PyErr_Occurred()) return nullptr;
    if (asked < 1 || static_cast<std::size_t>(asked) > kGroupsMost) {
        PyErr_Format(PyExc_ValueError, "n_tasks is %zd; it must be 1 to %zu", asked, kGroupsMost);
        return nullptr;
    }
    const auto tasks = static_cast<std::size_t>(asked);

    Scratch<std::uint16_t, 512> task_of(static_cast<std::size_t>(size));
    Scratch<Py_ssize_t, 64> sizes(tasks);
    Scratch<PyObject **, 64> ends(tasks);
    if (!task_of || !sizes || !ends) return nullptr;
    std::memset(sizes.data(), 0, tasks * sizeof(Py_ssize_t));
    const Modulo modulo(table.groups());
    const bool hashed = for_each_hash(keys, size, [&](Py_ssize_t i, std::uint64_t hash) {
        const std::uint16_t task = table.task(modulo(hash));
        if (task >= tasks) {
            PyErr_Format(PyExc_ValueError, "the table names task %d of %zu", int{task}, tasks);
            return false;
        }
        task_of[static_cast<std::size_t>(i)] = task;
        ++sizes[task];
        return true;
    });
    if (!hashed) return nullptr;

    const Py_ssize_t width = PyTuple_GET_SIZE(columns) + 1;
    Owned parts{PyList_New(asked)};
    if (!parts) return nullptr;
    for (std::size_t t = 0; t < tasks; ++t) {
        PyObject *part = PyTuple_New(width);
        if (part == nullptr) return nullptr;
        PyList_SET_ITEM(parts.get(), static_cast<Py_ssize_t>(t), part);
        for (Py_ssize_t c = 0; c < width; ++c) {
            PyObject *list = PyList_New(sizes[t]);
            if (list == nullptr) return nullptr;
            PyTuple_SET_ITEM(part, c, list);
        }
    }

    // Hashing and allocating (by a garbage collection) may have run Python code. From here on no Python code runs.
    if (PyList_GET_SIZE(keys) != size || !same_sizes(columns, size)) {
        if (!PyErr_Occurred()) keys_changed();
        return nullptr;
    }
    for (Py_ssize_t c = 0; c < width; ++c) {
        PyObject *column = c == 0 ? keys : PyTuple_GET_ITEM(columns, c - 1);
        for (std::size_t t = 0; t < tasks; ++t) {
            PyObject *part = PyList_GET_ITEM(parts.get(), static_cast<Py_ssize_t>(t));
            ends[t] = reinterpret_cast<PyListObject *>(PyTuple_GET_ITEM(part, c))->ob_item;
        }
        PyObject **items = reinterpret_cast<PyListObject *>(column)->ob_item;
        for (Py_ssize_t i = 0; i < size; ++i) {
            *ends[task_of[static_cast<std::size_t>(i)]]++ = Py_NewRef(items[i]);
        }
    }
    return parts.release();
}

template <typename Function>
PyCFunction as_method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

void bind_lists(nanobind::module_ &m) {
    static PyMethodDef methods[] = {
        {"stable_hash", stable_hash, METH_O,
         PyDoc_STR("stable_hash(key) -> int\n\n"
                   "Returns a key's 64-bit hash, which is the same in every process, and the same for equal keys.")},
        {"key_groups", as_method(key_groups), METH_FASTCALL,
         PyDoc_STR("key_groups(keys, n_groups) -> bytes\n\n"
                   "Returns each key's group, stable_hash(key) % n_groups, as native unsigned 16-bit numbers.")},
        {"partition", as_method(partition), METH_FASTCALL,
         PyDoc_STR("partition(keys, columns, table, n_tasks) -> list\n\n"
                   "Splits keys and columns (lists of the same length) by key: for each task the tuple\n"
                   "(keys, *columns) of the task's own keys, in order. `table` has the task of each key group as\n"
                   "native unsigned 16-bit numbers. The exception for a key that cannot be hashed has the key's\n"
                   "position as its attribute `index`.")},
        {nullptr, nullptr, 0, nullptr},
    };
    if (PyModule_AddFunctions(m.ptr(), methods) < 0) nanobind::raise_python_error();
}
