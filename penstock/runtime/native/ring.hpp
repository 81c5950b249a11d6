// OSRBuffer: one ring in shared memory into which many producers write and from which one consumer reads
// (docs/papers.md: T1 to T8). A message is copied once into the ring, and at most once out of it.
//
// Layout of a segment: Control | heads (S slots of 16 bytes) | payload (C bytes). The paper puts each head in
// front of its message. Here heads stand in a table of their own, because then a head word can be tagged with
// the sequence number of its message. A helper that comes late by a whole lap fails its compare-and-swap
// instead of harming a later message, the bytes of a payload are never mistaken for a head, and the payload
// never has to be zeroed for the next lap.
//
// One 64-bit descriptor holds a sequence number and a position: {seq:28, position:36}. Positions count units of
// 16 bytes. Both numbers only grow, and wrap around at their ends. There are two descriptors: producers move
// `reserved` (what has been given out), the consumer moves `released` (what may be overwritten). All messages
// between the two exist.
//
// Life of a slot. Each head word is {seq:28, status:4, start:32}; `start` is an offset into the payload, in units.
//
//   status     what it says                                       who writes it     from -> to
//   other      never used since the ring was created              creator           - -> other
//   isWriting  "message seq begins at start; it is being written" any producer      other, isReady, hasRead,
//              (the slot is *opened*; `reserved` tells whether it                   flush or isWriting of the
//              is also reserved)                                                    lap before -> isWriting
//   isReady    "head and payload are whole"                       its owner         isWriting -> isReady
//   flush      "no message; the next one is at the payload's      its owner         isWriting -> flush
//              beginning"
//   hasRead    "read, though an earlier slot is not read yet"     consumer          isReady, flush or (owner
//                                                                                   dead) isWriting -> hasRead
//
// Invariants:
//   1. `reserved` moves past slot s only after slot s was opened, so every reserved message has a known start,
//      and a known end: the start of the next slot, or the position in `reserved`. A crash cannot lose extents.
//   2. A producer names the slot it is about to take in its cell *before* it takes it, and takes one at a time,
//      so the owner of every unfinished slot can be found, and asked whether it is alive.
//   3. Only a slot's owner writes the slot's payload. The consumer gives a slot up only when no process that may
//      own it is alive.
//   4. A slot is opened for its next lap only when `released` has passed it.
//
// Memory ordering. Operations that pair with each other have the same label in the code:
//   PAIR commit    The owner stores isReady (release); the consumer loads the head word (acquire). A consumer that sees
//                  isReady sees the whole message, with its target and length.
//   PAIR open      Producers open a slot by a compare-and-swap of its head word (acquire and release). All who try
//                  write the same word, so it does not matter who succeeds.
//   PAIR reserve   Producers advance `reserved` by a compare-and-swap (release); producers and the consumer load it
//                  (acquire). Who sees a slot reserved sees it opened, and what its producer had finished before.
//   PAIR intent    A producer stores its intent (relaxed) before it advances `reserved`; the consumer loads the intent
//                  after it has loaded `reserved`. So the consumer finds the owner of every reserved slot.
//   PAIR idle      A producer clears its intent (release) after the commit; the consumer loads the intent (acquire). A
//                  consumer that sees no intent for a slot sees the slot's commit when it looks again.
//   PAIR release   The consumer stores `released` (release) after it has read; producers load it (acquire) before they
//                  write. So no producer writes over a message that is still being read.
//   PAIR call      A caller adds to `wakes` (release); the consumer loads it (acquire). The consumer
//                  then sees what the caller wrote before.
//   PAIR room, PAIR doorbell   Two fences (sequentially consistent). Each side stores its own flag or data, passes its
//                  fence, and then loads what the other side stores. At least one of the two sees the other, so no side
//                  sleeps while the other believes that it is awake. `room`: producers that wait for room, and the
//                  consumer's release. `doorbell`: the consumer that waits for messages, and a producer's commit.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "rhythm.hpp"
#include "ring_os.hpp"

// Fault points let the torture programs stop a process or a thread between any two steps. Other builds have none.
#ifdef PENSTOCK_FAULTS
#define PENSTOCK_FAULT(step) ::penstock::fault_hook(::penstock::Step::step)
#else
#define PENSTOCK_FAULT(step) ((void)0)
#endif

namespace penstock {

#ifdef PENSTOCK_FAULTS
enum class Step {
    named, opened, reserved, flush_reserved, flushed, copied, headed, committed, woken,  // of a write
    marked, published, room_called,                                                     // of a release
    looked,                                                                             // of the left edge
};
inline void (*fault_hook)(Step) = [](Step) {};
#endif

// Whether a process is dead. Tests that run producers as threads replace this function by one about threads.
inline bool (*is_dead)(os::Identity) = os::process_is_dead;

constexpr uint64_t kMagic = 0x474e4952'54534e50;  // "PNSTRING"
constexpr uint32_t kLayout = 1;
constexpr uint32_t kUnit = 16;
constexpr uint64_t kLine = 128;  // two cache lines: the adjacent-line prefetcher couples them
constexpr uint32_t kMaxProducers = 255;
constexpr uint64_t kMinCapacity = 1024, kMaxCapacity = uint64_t(1) << 34;
constexpr uint64_t kMinSlots = 8, kMaxSlots = uint64_t(1) << 24;
constexpr uint32_t kEarlyWake = 4096;  // bytes, from which on the wake-up is worth overlapping with the copy

// ---- descriptors and head words -------------------------------------------------------------------------

constexpr uint32_t kSeqMask = (1u << 28) - 1;
constexpr uint64_t kPosMask = (uint64_t(1) << 36) - 1;

using Seq = uint32_t;  // 28 bits

constexpr Seq after(Seq s, uint32_t n = 1) { return (s + n) & kSeqMask; }
constexpr uint32_t distance(Seq from, Seq to) { return (to - from) & kSeqMask; }

struct Descriptor {
    Seq seq;
    uint64_t pos;  // units
    constexpr uint64_t pack() const { return (uint64_t(seq) << 36) | pos; }
    static constexpr Descriptor unpack(uint64_t w) { return {Seq(w >> 36), w & kPosMask}; }
};

enum class Status : uint32_t { other, isWriting, isReady, hasRead, flush };

constexpr uint64_t head_word(Seq seq, Status status, uint32_t start) {
    return (uint64_t(seq) << 36) | (uint64_t(status) << 32) | start;
}
constexpr Seq seq_of(uint64_t word) { return Seq(word >> 36); }
constexpr Status status_of(uint64_t word) { return Status((word >> 32) & 0xf); }
constexpr uint32_t start_of(uint64_t word) { return uint32_t(word); }

constexpr uint64_t units(uint64_t bytes) { return (bytes + kUnit - 1) / kUnit; }

struct Head {
    std::atomic<uint64_t> word;
    uint32_t target;  // `target` and `length` belong to the slot's owner until isReady, and are read-only then
    uint32_t length;
};
static_assert(sizeof(Head) == 16 && std::atomic<uint64_t>::is_always_lock_free);

// ---- the control block ----------------------------------------------------------------------------------

// One attached producer. Only this producer writes the cell, except that any producer may take over the `identity` of a
// cell that is free, or whose producer is dead.
struct alignas(64) Cell {
    std::atomic<os::Identity> identity;  // 0: free
    std::atomic<uint64_t> intent;        // the slot that the producer takes or fills; kIdle: none
    std::atomic<uint64_t> messages, bytes, flushes;  // the next producer of the cell adds to these: sums stay right
};
constexpr uint64_t kIdle = 0;
constexpr uint64_t intent_for(Seq s) { return (uint64_t(1) << 32) | s; }

struct Control {
    // Written once, by the creator.
    uint64_t magic;
    uint32_t layout, unit;
    uint64_t capacity, slots, segment_bytes, pid_namespace;
    // Producers' side.
    alignas(kLine) std::atomic<uint64_t> reserved;
    // Consumer's side.
    alignas(kLine) std::atomic<uint64_t> released;
    alignas(kLine) std::atomic<os::Identity> consumer;  // 0: none
    std::atomic<uint64_t> delivered, skips, stalled;
    // The doorbell: 1 while the consumer sleeps. `wakes` counts calls that only mean to wake it.
    alignas(kLine) std::atomic<uint32_t> doorbell;
    std::atomic<uint32_t> wakes;
    // Producers that wait for room.
    alignas(kLine) std::atomic<uint32_t> room_wanted;
    std::atomic<uint32_t> room_bell;
    alignas(kLine) Cell cells[kMaxProducers];

    Head *heads() { return reinterpret_cast<Head *>(this + 1); }
    std::byte *payload() { return reinterpret_cast<std::byte *>(heads() + slots); }
    uint64_t max_message() const { return capacity / 2; }
};
static_assert(offsetof(Control, reserved) == 1 * kLine && offsetof(Control, released) == 2 * kLine &&
              offsetof(Control, consumer) == 3 * kLine && offsetof(Control, doorbell) == 4 * kLine &&
              offsetof(Control, room_wanted) == 5 * kLine && offsetof(Control, cells) == 6 * kLine);
static_assert(sizeof(Cell) == 64 && sizeof(Control) % 64 == 0);

inline uint64_t segment_bytes(uint64_t capacity, uint64_t slots) {
    return sizeof(Control) + slots * sizeof(Head) + capacity;
}

inline void initialise(Control &c, uint64_t capacity, uint64_t slots) {
    c.layout = kLayout;
    c.unit = kUnit;
    c.capacity = capacity;
    c.slots = slots;
    c.segment_bytes = segment_bytes(capacity, slots);
    c.pid_namespace = os::pid_namespace();
    for (uint64_t i = 0; i < slots; ++i)  // the words that slots have after a lap: slot i waits for message i
        c.heads()[i].word.store(head_word(Seq(i - slots) & kSeqMask, Status::other, 0), std::memory_order_relaxed);
    c.magic = kMagic;
}

inline void ring_doorbell(Control &c) {
    // Of several producers that find the consumer asleep, the exchange lets only one make the system call.
    if (c.doorbell.load(std::memory_order_relaxed) != 0 && c.doorbell.exchange(0, std::memory_order_relaxed) != 0)
        os::futex_wake(c.doorbell, 1);
}

inline void call_consumer(Control &c) {
    c.wakes.fetch_add(1, std::memory_order_release);      // PAIR call
    std::atomic_thread_fence(std::memory_order_seq_cst);  // PAIR doorbell
    ring_doorbell(c);
}

// ---- producer -------------------------------------------------------------------------------------------

class Producer {
  public:
    // Takes a free cell, or the cell of a dead producer whose last slot the consumer has passed. Returns false when all
    // cells are in use.
    bool attach(Control &c, os::Identity self) {
        control_ = &c;
        heads_ = c.heads();
        payload_ = c.payload();
        unit_mask_ = c.capacity / kUnit - 1;
        slots_ = uint32_t(c.slots);
        for (Cell &cell : c.cells) {
            os::Identity holder = cell.identity.load(std::memory_order_acquire);
            if (holder != 0 && !(is_dead(holder) && settled(cell))) continue;
            if (!cell.identity.compare_exchange_strong(holder, self, std::memory_order_acq_rel)) continue;
            cell.intent.store(kIdle, std::memory_order_relaxed);
            cell_ = &cell;
            return true;
        }
        return false;
    }

    void detach() {
        cell_->identity.store(0, std::memory_order_release);
        cell_ = nullptr;
    }

    // Writes one message if there is room. `fill(std::byte *)` copies `length` bytes. It must not throw, because a
    // reserved slot must be finished.
    template <class Fill>
    bool try_put(uint32_t target, uint32_t length, Fill &&fill) {
        Descriptor d;
        if (!reserve(units(length), d)) return false;
        Head &head = heads_[d.seq & (slots_ - 1)];
        const uint32_t start = uint32_t(d.pos & unit_mask_);
        // Early wake: while we copy, the consumer wakes up. This needs no fence. If it misses a consumer that is just
        // falling asleep, the call of ring_doorbell after the commit wakes it.
        if (length >= kEarlyWake) ring_doorbell(*control_);
        fill(payload_ + uint64_t(start) * kUnit);
        PENSTOCK_FAULT(copied);
        head.target = target;
        head.length = length;
        PENSTOCK_FAULT(headed);
        head.word.store(head_word(d.seq, Status::isReady, start), std::memory_order_release);  // PAIR commit
        PENSTOCK_FAULT(committed);
        cell_->intent.store(kIdle, std::memory_order_release);  // PAIR idle
        bump(cell_->messages, 1);
        bump(cell_->bytes, length);
        // Either the consumer, after its own fence, sees our commit, or we see here that it sleeps.
        std::atomic_thread_fence(std::memory_order_seq_cst);  // PAIR doorbell
        ring_doorbell(*control_);
        PENSTOCK_FAULT(woken);
        return true;
    }

    // Sleeps until a message of `length` bytes would fit, but not longer than `ns`. It may return early.
    void wait_for_room(uint32_t length, uint64_t ns) {
        const uint32_t bell = control_->room_bell.load(std::memory_order_acquire);
        control_->room_wanted.store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // PAIR room
        if (!fits(units(length))) os::futex_wait(control_->room_bell, bell, ns);
    }

    // Whether a consumer has died without detaching. Where there has been no consumer yet, one may still attach.
    bool consumer_died() const {
        os::Identity id = control_->consumer.load(std::memory_order_acquire);
        return id != 0 && is_dead(id);
    }

    const Cell &cell() const { return *cell_; }

  private:
    static void bump(std::atomic<uint64_t> &count, uint64_t by) {
        count.store(count.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
    }

    // Whether the consumer has passed the slot that the producer of this cell has named last, or no slot is named.
    bool settled(const Cell &cell) const {
        const uint64_t intent = cell.intent.load(std::memory_order_acquire);
        if (intent == kIdle) return true;
        const Seq s = Seq(intent) & kSeqMask;
        const Seq released = Descriptor::unpack(control_->released.load(std::memory_order_acquire)).seq;
        const Seq reserved = Descriptor::unpack(control_->reserved.load(std::memory_order_acquire)).seq;
        return distance(released, s) >= distance(released, reserved);  // outside [released, reserved)
    }

    struct Need {
        uint64_t units;  // room needed in all
        uint64_t rest;   // units of it that are skipped at the payload's end (T6); 0: the message fits before the end
    };
    Need need(uint64_t n, uint64_t pos) const {
        const uint64_t rest = unit_mask_ + 1 - (pos & unit_mask_);
        return n > rest ? Need{n + rest, rest} : Need{n, 0};
    }

    bool has_room(const Descriptor &d, const Need &need, uint64_t released) const {
        const Descriptor r = Descriptor::unpack(released);
        return ((d.pos - r.pos) & kPosMask) + need.units <= unit_mask_ + 1 &&
               distance(r.seq, d.seq) + (need.rest ? 2 : 1) <= slots_;
    }

    bool fits(uint64_t n) const {
        for (uint64_t word = control_->reserved.load(std::memory_order_acquire);;) {
            const Descriptor d = Descriptor::unpack(word);
            if (has_room(d, need(n, d.pos), control_->released.load(std::memory_order_acquire))) return true;
            const uint64_t again = control_->reserved.load(std::memory_order_acquire);
            if (again == word) return false;
            word = again;
        }
    }

    // Reserves a slot and `n` units of payload (T3). On success the slot `out.seq` is ours, and the payload from
    // `out.pos` on. Returns false when there is no room.
    bool reserve(uint64_t n, Descriptor &out) {
        uint64_t word = control_->reserved.load(std::memory_order_acquire);  // PAIR reserve
        for (;;) {
            const Descriptor d = Descriptor::unpack(word);
            const Need want = need(n, d.pos);
            if (!has_room(d, want, control_->released.load(std::memory_order_acquire))) {  // PAIR release
                // An old `reserved` beside a new `released` may look full. Only if `reserved` has not changed, the
                // ring is full.
                const uint64_t again = control_->reserved.load(std::memory_order_acquire);
                if (again == word) {
                    cell_->intent.store(kIdle, std::memory_order_relaxed);
                    return false;
                }
                word = again;
                continue;
            }
            // The compare-and-swap of `reserved` below makes the intent visible to the consumer.
            cell_->intent.store(intent_for(d.seq), std::memory_order_relaxed);  // PAIR intent
            PENSTOCK_FAULT(named);
            Head &head = heads_[d.seq & (slots_ - 1)];
            const uint32_t start = uint32_t(d.pos & unit_mask_);
            uint64_t was = head.word.load(std::memory_order_acquire);
            if (seq_of(was) != d.seq) {
                if (seq_of(was) != ((d.seq - slots_) & kSeqMask)) {  // laps have passed since we read `reserved`
                    word = control_->reserved.load(std::memory_order_acquire);
                    continue;
                }
                // Everybody who opens slot d.seq writes the same word, so we need not know whether we succeeded.
                head.word.compare_exchange_strong(was, head_word(d.seq, Status::isWriting, start),
                                                  std::memory_order_acq_rel);  // PAIR open
            }
            PENSTOCK_FAULT(opened);
            const Descriptor next{after(d.seq), (d.pos + (want.rest ? want.rest : n)) & kPosMask};
            if (!control_->reserved.compare_exchange_weak(word, next.pack(), std::memory_order_acq_rel,
                                                          std::memory_order_acquire))  // PAIR reserve, intent
                continue;
            if (!want.rest) {
                PENSTOCK_FAULT(reserved);
                out = d;
                return true;
            }
            PENSTOCK_FAULT(flush_reserved);
            head.word.store(head_word(d.seq, Status::flush, start), std::memory_order_release);
            bump(cell_->flushes, 1);
            PENSTOCK_FAULT(flushed);
            word = control_->reserved.load(std::memory_order_acquire);
        }
    }

    Control *control_ = nullptr;
    Head *heads_ = nullptr;
    std::byte *payload_ = nullptr;
    Cell *cell_ = nullptr;
    uint64_t unit_mask_ = 0;
    uint32_t slots_ = 0;
};

// ---- consumer -------------------------------------------------------------------------------------------

// How long a consumer looks for messages before it sleeps. To wake a consumer costs the producer a system call and the
// consumer tens of microseconds; a consumer that looks costs a core.
struct Wait {
    uint64_t max_spin_ns = 150'000;
    bool adaptive = true;  // look only when it pays, by the rhythm in which messages come
};

struct Taken {
    Seq seq;
    uint32_t target, length;
    const std::byte *data;
};

struct Skipped {
    Seq seq;
    int pid;
    uint64_t bytes;  // what had been reserved
};

// Only one thread at a time may use a Consumer, with one exception: wait() changes nothing that release_copies() and
// release_held() use, so that these may run in another thread during wait().
class Consumer {
  public:
    // All in nanoseconds.
    static constexpr uint64_t kGrace = 1'000'000;         // age from which /proc is asked about a slot's owner
    static constexpr uint64_t kCopySpin = 60'000;         // how long we look for the end of a copy before we sleep
    static constexpr uint64_t kSlice = 500'000'000;       // longest sleep; a producer may die before it wakes us
    static constexpr uint64_t kStuckSlice = 100'000'000;  // longest sleep while a slot is stuck; its producer may die

    // Attaches as the ring's consumer, in the place of a dead one if there is one. Returns 0, or the identity of the
    // living consumer that the ring already has. `read_ahead`: see Ring.consumer(); 0: all slots.
    os::Identity attach(Control &c, os::Identity self, uint32_t read_ahead, Wait wait) {
        os::Identity holder = 0;
        while (!c.consumer.compare_exchange_strong(holder, self, std::memory_order_acq_rel))
            if (holder != 0 && !is_dead(holder)) return holder;
        control_ = &c;
        heads_ = c.heads();
        payload_ = c.payload();
        unit_mask_ = c.capacity / kUnit - 1;
        slots_ = uint32_t(c.slots);
        read_ahead_ = std::clamp<uint32_t>(read_ahead ? read_ahead : slots_, 1, slots_);
        wait_ = wait;
        const Descriptor r = Descriptor::unpack(c.released.load(std::memory_order_acquire));
        left_ = next_ = copies_ = r.seq;
        left_pos_ = next_pos_ = r.pos;
        states_.assign(slots_, State::done);
        calls_seen_ = c.wakes.load(std::memory_order_acquire);
        rhythm_.begin(os::now_ns());
        return 0;
    }

    // Gives up the consumer's place. The next consumer gets again what this one was given and has not released.
    void detach() {
        control_->consumer.store(0, std::memory_order_release);
        control_ = nullptr;
    }

    // Finds up to out.size() messages, and keeps the order of each producer's messages. They stay in the ring until
    // they are released. Returns how many were found.
    size_t collect(std::span<Taken> out) {
        size_t n = stuck_.empty() ? 0 : collect_stuck(out, true);
        while (n < out.size()) {
            Head &head = head_of(next_);
            const uint64_t word = head.word.load(std::memory_order_acquire);  // PAIR commit
            if (seq_of(word) != next_) break;
            if (!stuck_.empty() && distance(stuck_.front().seq, next_) >= read_ahead_) break;
            const Status status = status_of(word);
            if (status == Status::isReady) {
                // The producer of this message may have finished a stuck slot before. Our acquire above then makes that
                // visible, and the message of the stuck slot must come first, to keep the producer's order.
                if (!stuck_.empty() && (n += collect_stuck(out.subspan(n), false)) == out.size()) break;
                out[n++] = take(next_, head, word);
                advance(State::copied, units(head.length));
            } else if (status == Status::flush || status == Status::hasRead) {
                advance(State::done, extent_of_next(word));
            } else {
                if (n > 0) break;  // return what was found; most slots are finished by the next call
                // PAIR reserve, intent: after this load the slot's owner can be found
                if (Descriptor::unpack(control_->reserved.load(std::memory_order_acquire)).seq == next_) break;
                if (finishes_at_once(head)) continue;
                const uint64_t now = os::now_ns();
                stuck_.push_back({next_, now, now + kGrace, kGrace});
                ++detained_;
                advance(State::stuck, extent_of_next(word));
            }
        }
        if (n > 0) count_arrivals(n);
        return n;
    }

    // Holds a message that the last collect() has found: release_held() releases it, and release_copies(), which
    // releases all other messages, does not.
    void hold(Seq seq) {
        state(seq) = State::held;
        std::erase(late_, seq);  // the next release_copies() may find another message in the slot
        ++detained_;
    }

    void release_copies() {
        if (detained_ == 0) {  // no slot between the edges is stuck or held: one store releases all
            if (left_ == next_) return;
            left_ = copies_ = next_;
            left_pos_ = next_pos_;
            late_.clear();
            publish();
            return;
        }
        for (Seq s : late_) finish_if_copied(s);
        late_.clear();
        if (distance(copies_, next_) > distance(left_, next_)) copies_ = left_;
        for (; copies_ != next_; copies_ = after(copies_)) finish_if_copied(copies_);
        advance_left();
    }

    void release_held(Seq seq) {
        --detained_;
        finish(seq);
        advance_left();
    }

    // Waits until collect() may find something, or somebody has used call_consumer(), or `ns` have passed.
    void wait(uint64_t ns) {
        const uint64_t start = os::now_ns(), end = start + std::min(ns, stuck_.empty() ? kSlice : kStuckSlice);
        Rhythm::Watch watch = wait_.adaptive ? rhythm_.watch(start, wait_.max_spin_ns)
                                             : Rhythm::Watch{0, start + wait_.max_spin_ns};
        if (!stuck_.empty()) watch = {0, std::max(watch.look_until, stuck_.back().since + kCopySpin)};
        if (watch.sleep_until > start) {
            {
                os::ExactTimers exact;
                sleep(std::min(watch.sleep_until, end) - start);
            }
            const uint64_t now = os::now_ns();
            if (now < watch.sleep_until) return;
            rhythm_.woke(watch.sleep_until, now);
        }
        uint64_t now = os::now_ns();
        for (const uint64_t until = std::min(watch.look_until, end); now < until; now = os::now_ns())
            for (int i = 0; i < 16; ++i) {
                if (pending()) return;
                os::pause();
            }
        uint64_t until = end;
        for (const Stuck &s : stuck_) until = std::min(until, s.check_at);
        if (until > now) sleep(until - now);
    }

    // If messages come in a flood, waits some microseconds, so that the next collect() finds many at once.
    void gather() const {
        if (!wait_.adaptive) return;
        const uint64_t until = rhythm_.gather_until();
        if (until != 0)
            while (os::now_ns() < until) os::pause();
    }

    // Whether call_consumer() was used since the last call of this function.
    bool called() {
        const uint32_t calls = control_->wakes.load(std::memory_order_acquire);  // PAIR call
        return std::exchange(calls_seen_, calls) != calls;
    }

    // Returns the slots that were given up since the last call, because their producers are dead.
    std::vector<Skipped> take_skips() { return std::exchange(skips_, {}); }
    size_t skips_waiting() const { return skips_.size(); }

  private:
    // What this consumer knows of a slot between the edges.
    enum class State : uint8_t { copied, held, stuck, done };

    struct Stuck {
        Seq seq;
        uint64_t since, check_at, patience;
        bool counted = false;
    };

    Head &head_of(Seq s) const { return heads_[s & (slots_ - 1)]; }
    State &state(Seq s) { return states_[s & (slots_ - 1)]; }

    Taken take(Seq seq, const Head &head, uint64_t word) const {
        return {seq, head.target, head.length, payload_ + uint64_t(start_of(word)) * kUnit};
    }

    void advance(State s, uint64_t extent) {
        state(next_) = s;
        next_ = after(next_);
        next_pos_ = (next_pos_ + extent) & kPosMask;
    }

    // The units that slot next_ takes. No message takes more than half of the ring, so that two offsets determine it.
    uint64_t extent_of_next(uint64_t word) const {
        const Descriptor r = Descriptor::unpack(control_->reserved.load(std::memory_order_acquire));  // PAIR reserve
        const uint64_t end = r.seq == after(next_)
                                 ? r.pos
                                 : start_of(head_of(after(next_)).word.load(std::memory_order_acquire));
        return (end - start_of(word)) & unit_mask_;
    }
    // The same for a slot between the edges.
    uint64_t extent_of(Seq s) const {
        const uint64_t end = after(s) == next_
                                 ? next_pos_
                                 : start_of(head_of(after(s)).word.load(std::memory_order_relaxed));
        return (end - start_of(head_of(s).word.load(std::memory_order_relaxed))) & unit_mask_;
    }

    // Whether the slot's owner finishes within a few hundred nanoseconds.
    static bool finishes_at_once(const Head &head) {
        for (int i = 0; i < 24; ++i) {
            if (status_of(head.word.load(std::memory_order_relaxed)) != Status::isWriting) return true;
            os::pause();
        }
        return false;
    }

    // Takes stuck slots that have been finished, and gives up stuck slots of dead producers (T5).
    size_t collect_stuck(std::span<Taken> out, bool look_for_dead) {
        // The order by seq keeps each producer's order: a producer that has a second slot here had finished the first
        // before it reserved the second, and our acquire of `reserved` has made that visible.
        size_t n = 0;
        const uint64_t now = look_for_dead ? os::now_ns() : 0;
        std::erase_if(stuck_, [&](Stuck &s) {
            const uint64_t word = head_of(s.seq).word.load(std::memory_order_acquire);  // PAIR commit
            PENSTOCK_FAULT(looked);
            switch (status_of(word)) {
                case Status::isReady:
                    if (n == out.size()) return false;
                    out[n++] = take(s.seq, head_of(s.seq), word);
                    settle(s.seq);
                    return true;
                case Status::isWriting: return look_for_dead && now >= s.check_at && given_up(s, now);
                default: settle(s.seq); return true;  // a flush
            }
        });
        return n;
    }

    // Whether a stuck slot was given up now, because its owner is dead.
    bool given_up(Stuck &s, uint64_t now) {
        const int pid = dead_owner(s.seq);
        if (pid == 0) {
            if (!std::exchange(s.counted, true)) control_->stalled.fetch_add(1, std::memory_order_relaxed);
            s.patience = std::min(s.patience * 2, kStuckSlice);
            s.check_at = now + s.patience;
            return false;
        }
        // The owner may have finished the slot before it died. Then the next call of collect_stuck takes the message.
        if (status_of(head_of(s.seq).word.load(std::memory_order_acquire)) != Status::isWriting) return false;
        skips_.push_back({s.seq, pid, extent_of(s.seq) * kUnit});
        control_->skips.fetch_add(1, std::memory_order_relaxed);
        // Not State::done: if we die before our caller has heard of this, the next consumer must find the slot again.
        settle(s.seq);
        return true;
    }

    // Treats a slot that was stuck like a message that was copied: release_copies() releases it.
    void settle(Seq seq) {
        state(seq) = State::copied;
        --detained_;
        late_.push_back(seq);
    }

    // Returns the pid of a dead producer that may own this slot, or 0 if a living one may own it, or nobody.
    int dead_owner(Seq seq) const {
        int pid = 0;
        for (const Cell &cell : control_->cells) {
            const os::Identity id = cell.identity.load(std::memory_order_acquire);
            if (id == 0 || cell.intent.load(std::memory_order_acquire) != intent_for(seq)) continue;  // PAIR idle, intent
            if (!is_dead(id)) return 0;
            pid = os::pid_of(id);
        }
        return pid;
    }

    void finish_if_copied(Seq s) {
        if (state(s) == State::copied) finish(s);
    }

    // Marks a slot as read, also for a consumer that may come after us. advance_left() passes it when it gets there.
    void finish(Seq s) {
        state(s) = State::done;
        Head &head = head_of(s);
        const uint64_t word = head.word.load(std::memory_order_relaxed);
        head.word.store(head_word(s, Status::hasRead, start_of(word)), std::memory_order_relaxed);
        PENSTOCK_FAULT(marked);
    }

    // Moves the left edge past all slots that are done, and releases them.
    void advance_left() {
        const Seq from = left_;
        while (left_ != next_ && state(left_) == State::done) {
            left_pos_ = (left_pos_ + extent_of(left_)) & kPosMask;
            left_ = after(left_);
        }
        if (left_ != from) publish();
    }

    // Stores the left edge in `released`, and wakes producers that wait for room.
    void publish() {
        control_->released.store(Descriptor{left_, left_pos_}.pack(), std::memory_order_release);  // PAIR release
        PENSTOCK_FAULT(published);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // PAIR room
        if (control_->room_wanted.load(std::memory_order_relaxed)) {
            control_->room_wanted.store(0, std::memory_order_relaxed);
            PENSTOCK_FAULT(room_called);
            control_->room_bell.fetch_add(1, std::memory_order_release);
            os::futex_wake(control_->room_bell, INT_MAX);
        }
    }

    // Whether collect() may find something, or somebody has used call_consumer().
    bool pending() const {
        const uint64_t word = head_of(next_).word.load(std::memory_order_acquire);
        if (seq_of(word) == next_ && (stuck_.empty() || distance(stuck_.front().seq, next_) < read_ahead_) &&
            (status_of(word) != Status::isWriting ||
             Descriptor::unpack(control_->reserved.load(std::memory_order_acquire)).seq != next_))
            return true;
        for (const Stuck &s : stuck_)
            if (status_of(head_of(s.seq).word.load(std::memory_order_relaxed)) != Status::isWriting) return true;
        return control_->wakes.load(std::memory_order_relaxed) != calls_seen_;
    }

    void count_arrivals(size_t n) {
        control_->delivered.store(control_->delivered.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
        if (wait_.adaptive) rhythm_.arrived(n, os::now_ns());
    }

    // Sleeps on the doorbell until something is pending, or `ns` have passed.
    void sleep(uint64_t ns) {
        control_->doorbell.store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // PAIR doorbell
        if (!pending()) os::futex_wait(control_->doorbell, 1, ns);
        control_->doorbell.store(0, std::memory_order_relaxed);
    }

    Control *control_ = nullptr;
    Head *heads_ = nullptr;
    const std::byte *payload_ = nullptr;
    uint64_t unit_mask_ = 0;
    uint32_t slots_ = 0, read_ahead_ = 0;
    Wait wait_;

    Seq left_ = 0, next_ = 0;  // the left and the right edge: slots [left_, next_) were looked at and are not released
    uint64_t left_pos_ = 0, next_pos_ = 0;
    Seq copies_ = 0;           // release_copies() has dealt with all slots before this one, but those in late_
    std::vector<Seq> late_;    // slots before copies_ that were stuck then, and were taken or given up since
    size_t detained_ = 0;      // stuck or held slots between the edges
    std::vector<State> states_;
    std::vector<Stuck> stuck_;  // by seq
    std::vector<Skipped> skips_;
    uint32_t calls_seen_ = 0;
    Rhythm rhythm_;
};

}  // namespace penstock
