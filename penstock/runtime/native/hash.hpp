// A 64-bit hash of bytes and of small values, the same in every process and on every machine.
//
// The key group of a key is computed from its hash, so hashes are part of the checkpoint format: after a change of any
// constant or step here, saved state would belong to other tasks than its keys. The hash spreads regular keys and keys
// with common prefixes well, but does not resist an adversary who picks keys to collide. Nothing here knows of Python.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock {

// Fractional parts of the square roots of the first primes (no hidden structure), made odd.
inline constexpr std::uint64_t kA = 0x6a09e667f3bcc909ull;
inline constexpr std::uint64_t kB = 0xbb67ae8584caa73bull;
inline constexpr std::uint64_t kC = 0x3c6ef372fe94f82bull;
inline constexpr std::uint64_t kD = 0xa54ff53a5f1d36f1ull;

// The kind of a hashed value. Values with the same bytes that must have different hashes ("a", b"a") have different
// tags.
enum class Tag : std::uint64_t {
    none = 0x510e527fade682d1ull,
    number = 0x9b05688c2b3e6c1full,
    text = 0x1f83d9abfb41bd6bull,
    bytes = 0x5be0cd19137e2179ull,
    tuple = 0xcbbb9d5dc1059ed9ull,
    set = 0x629a292a367cd507ull,
};

// The full 128-bit product folded to 64 bits: every bit of either side reaches every bit of the result.
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) noexcept {
    __extension__ using wide = unsigned __int128;
    const wide product = static_cast<wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

// Spreads one word over all bits, as `hash % groups` looks at the low ones only. A bijection.
inline std::uint64_t spread(std::uint64_t x) noexcept {
    x ^= x >> 32;
    x *= kD;
    x ^= x >> 29;
    x *= kB;
    return x ^ (x >> 32);
}

// Little-endian loads from any address, on any machine.
inline std::uint64_t load8(const unsigned char *p) noexcept {
    std::uint64_t word;
    std::memcpy(&word, p, sizeof word);
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
    return word;
}

inline std::uint64_t load4(const unsigned char *p) noexcept {
    std::uint32_t word;
    std::memcpy(&word, p, sizeof word);
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
    return word;
}

inline std::uint64_t hash_word(std::uint64_t word, Tag tag) noexcept {
    return spread(fold(word ^ kA, static_cast<std::uint64_t>(tag)) + word);
}

inline std::uint64_t hash_bytes(const void *data, std::size_t size, Tag tag) noexcept {
    const auto *p = static_cast<const unsigned char *>(data);
    std::uint64_t state = static_cast<std::uint64_t>(tag);
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    if (size > 16) {
        // 16 bytes in each step. The last 16 bytes overlap with the last step, which saves a loop over single bytes.
        std::size_t left = size;
        for (; left > 16; left -= 16, p += 16) state = fold(load8(p) ^ kA, load8(p + 8) ^ state) + kC;
        p += left - 16;
        first = load8(p);
        last = load8(p + 8);
    } else if (size >= 8) {
        first = load8(p);
        last = load8(p + size - 8);
    } else if (size >= 4) {
        first = load4(p);
        last = load4(p + size - 4);
    } else if (size > 0) {
        // The first, middle and last byte are all of 1, 2 or 3 bytes.
        first = p[0] | (std::uint64_t{p[size / 2]} << 8) | (std::uint64_t{p[size - 1]} << 16);
    }
    // The size distinguishes inputs whose overlapping loads are equal ("a", "aa").
    return spread(fold(first ^ kB, last ^ state) ^ (size * kC));
}

// Hashes of sequences: the order of calls counts.
class Sequence {
  public:
    explicit Sequence(Tag tag) noexcept : state_(static_cast<std::uint64_t>(tag)) {}
    void add(std::uint64_t hash) noexcept { state_ = fold(state_ ^ kA, hash ^ kB) + hash + kC; }
    std::uint64_t finish(std::size_t size) const noexcept { return spread(state_ ^ (size * kC)); }

  private:
    std::uint64_t state_;
};

// Hashes of sets: the order of calls does not count, so elements are spread first and then only summed.
class Unordered {
  public:
    void add(std::uint64_t hash) noexcept {
        const std::uint64_t mixed = spread(hash ^ kA);
        sum_ += mixed;
        parity_ ^= fold(mixed ^ kB, kD);
    }
    std::uint64_t finish(std::size_t size) const noexcept {
        return spread(fold(sum_ ^ static_cast<std::uint64_t>(Tag::set), parity_ ^ kC) + size * kA);
    }

  private:
    std::uint64_t sum_ = 0;
    std::uint64_t parity_ = 0;
};

// Bytes that encode_utf8 may write for one code point.
inline constexpr std::size_t kUtf8Most = 4;

// Writes code points as UTF-8 and returns the end. A lone surrogate is written as three bytes like any other
// code point of its size: no valid text has these bytes, so nothing collides and nothing fails.
template <typename Unit>
unsigned char *encode_utf8(const Unit *units, std::size_t count, unsigned char *out) noexcept {
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t c = units[i];
        if (c < 0x80) {
            *out++ = static_cast<unsigned char>(c);
        } else if (c < 0x800) {
            *out++ = static_cast<unsigned char>(0xc0 | (c >> 6));
            *out++ = static_cast<unsigned char>(0x80 | (c & 0x3f));
        } else if (c < 0x10000) {
            *out++ = static_cast<unsigned char>(0xe0 | (c >> 12));
            *out++ = static_cast<unsigned char>(0x80 | ((c >> 6) & 0x3f));
            *out++ = static_cast<unsigned char>(0x80 | (c & 0x3f));
        } else {
            *out++ = static_cast<unsigned char>(0xf0 | (c >> 18));
            *out++ = static_cast<unsigned char>(0x80 | ((c >> 12) & 0x3f));
            *out++ = static_cast<unsigned char>(0x80 | ((c >> 6) & 0x3f));
            *out++ = static_cast<unsigned char>(0x80 | (c & 0x3f));
        }
    }
    return out;
}

}  // namespace penstock
