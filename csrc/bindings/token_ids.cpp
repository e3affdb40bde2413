#include "token_ids.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "sequences.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

[[noreturn]] void raise(PyObject* type, const char* message) {
    PyErr_SetString(type, message);
    throw nb::python_error();
}

[[noreturn]] void raise_too_large() {
    raise(PyExc_OverflowError, "a token id does not fit into 32 bits");
}

// Read a small non-negative int, without a function call if its structure is visible; token ids always are small.
// False for any other object.
inline bool read_small(PyObject* object, std::uint32_t& word) {
    if (!PyLong_CheckExact(object)) return false;
#if defined(Py_LIMITED_API)
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(object, &overflow);
    word = static_cast<std::uint32_t>(value);
    return std::in_range<std::uint32_t>(value);
#else
    const auto* number = reinterpret_cast<const PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
    if (!PyUnstable_Long_IsCompact(number)) return false;
    const Py_ssize_t value = PyUnstable_Long_CompactValue(number);
    word = static_cast<std::uint32_t>(value);
    return value >= 0;
#else
    const auto digits = static_cast<std::size_t>(Py_SIZE(number));
    word = number->ob_digit[0];
    return digits <= 1;
#endif
#endif
}

std::uint32_t read_any(PyObject* object) {
    const nb::object number = nb::steal(PyNumber_Index(object));
    if (!number.is_valid()) throw nb::python_error();
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0 || !std::in_range<std::uint32_t>(value)) raise_too_large();
    return static_cast<std::uint32_t>(value);
}

Py_ssize_t to_index(std::size_t size) {
    return static_cast<Py_ssize_t>(std::min(size, static_cast<std::size_t>(PY_SSIZE_T_MAX)));
}

// Read items of a list or tuple from `start` on, which must have that many.
void read_items(const nb::object& sequence, std::size_t start, std::span<std::uint32_t> words) {
    for (std::size_t at = 0;; ++at) {
        const Items items(sequence.ptr(), start);
        while (at < words.size() && read_small(items[at], words[at])) ++at;
        if (at == words.size()) return;
        words[at] = read_any(nb::borrow(items[at]).ptr());
        // __index__ can run any code, and may have changed the list.
        if (static_cast<std::size_t>(count_items(sequence.ptr())) < start + words.size()) {
            raise(PyExc_RuntimeError, "the token ids changed while they were read");
        }
    }
}

}  // namespace

TokenIds::TokenIds(PyObject* object) {
    if (PyList_CheckExact(object) || !take_buffer(object)) take_items(object);
}

TokenIds::~TokenIds() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

std::span<std::uint32_t> TokenIds::make_words(std::size_t count) {
    own_ = std::make_unique_for_overwrite<std::uint32_t[]>(count);
    words_ = own_.get();
    size_ = count;
    return {own_.get(), count};
}

bool TokenIds::take_buffer(PyObject* object) {
    if (!PyObject_CheckBuffer(object)) return false;
    if (PyObject_GetBuffer(object, &buffer_, PyBUF_CONTIG_RO | PyBUF_FORMAT) != 0) {
        PyErr_Clear();
        return false;
    }
    const std::string_view format = buffer_.format == nullptr ? "B" : buffer_.format;
    if (PyBytes_Check(object) || PyByteArray_Check(object)) {
        take_words();
    } else if (buffer_.ndim != 1) {
        return false;
    } else if (format == "I" || (format == "L" && buffer_.itemsize == sizeof(std::uint32_t))) {
        words_ = static_cast<const std::uint32_t*>(buffer_.buf);
        size_ = static_cast<std::size_t>(buffer_.len) / sizeof(std::uint32_t);
    } else if (format == "i") {
        take_integers<int>();
    } else if (format == "l") {
        take_integers<long>();
    } else if (format == "q") {
        take_integers<long long>();
    } else {
        return false;
    }
    return true;
}

void TokenIds::take_words() {
    const auto length = static_cast<std::size_t>(buffer_.len);
    if (length % sizeof(std::uint32_t) != 0) raise(PyExc_ValueError, "the length of the bytes is not a multiple of 4");
    if (reinterpret_cast<std::uintptr_t>(buffer_.buf) % alignof(std::uint32_t) != 0) {
        std::memcpy(make_words(length / sizeof(std::uint32_t)).data(), buffer_.buf, length);
        return;
    }
    words_ = static_cast<const std::uint32_t*>(buffer_.buf);
    size_ = length / sizeof(std::uint32_t);
}

template <typename Integer>
void TokenIds::take_integers() {
    const auto* integer = static_cast<const Integer*>(buffer_.buf);
    bool fit = true;
    for (std::uint32_t& word : make_words(static_cast<std::size_t>(buffer_.len) / sizeof(Integer))) {
        fit &= std::in_range<std::uint32_t>(*integer);
        word = static_cast<std::uint32_t>(*integer++);
    }
    if (!fit) raise_too_large();
}

void TokenIds::take_items(PyObject* object) {
    const nb::object sequence = fast_sequence(object, "token ids must be a sequence of integers");
    const Py_ssize_t count = count_items(sequence.ptr());
    read_items(sequence, 0, make_words(static_cast<std::size_t>(count)));
}

nb::bytes encode_tokens(nb::handle tokens, std::size_t start, std::size_t stop) {
    const auto size = static_cast<std::size_t>(PyList_CheckExact(tokens.ptr()) ? count_items(tokens.ptr()) : 0);
    if (start > stop || stop > size) {  // Not a list, or not in it.
        const nb::object slice = nb::steal(PySequence_GetSlice(tokens.ptr(), to_index(start), to_index(stop)));
        if (!slice.is_valid()) throw nb::python_error();
        const TokenIds ids(slice.ptr());
        return nb::bytes(ids.all().data(), ids.all().size_bytes());
    }
    const std::size_t count = stop - start;
    nb::bytes encoded = new_bytes(count * sizeof(std::uint32_t));
    read_items(nb::borrow(tokens), start, {reinterpret_cast<std::uint32_t*>(bytes_memory(encoded.ptr())), count});
    return encoded;
}

}  // namespace kvtier::bindings
