// What the two torture programs share: a round's plan, the ledger that says what must come out, the producer's and
// the consumer's lives, and the audit at the end. They differ in what a death is: SIGKILL, or the end of a thread.
//
// The ledger lies in memory that all share, outside the ring. A producer writes into it before and after each
// message, the consumer before and after each release; so whenever either is stopped, the ledger says what the ring
// must do with each message, or that both answers are right (killed between the ring's step and the entry).
#pragma once

#include <sys/mman.h>

#include <cinttypes>
#include <cstdarg>
#include <functional>
#include <memory>
#include <set>
#include <thread>

#include "ring_segment.hpp"

namespace torture {

using namespace penstock;

constexpr int kMaxLanes = 32;
constexpr uint64_t kPerLane = 150'000;  // messages of a lane in a round
constexpr int kMaxDeaths = 4096;

struct Random {  // splitmix64
    uint64_t state;
    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    uint64_t below(uint64_t n) { return next() % n; }
    bool one_in(uint64_t n) { return n != 0 && below(n) == 0; }
};

// Everything about a round follows from its seed (but for the machine's timing).
struct Plan {
    uint64_t seed, capacity, slots, largest, kill_producer, kill_consumer, hold, pace, dawdle;
    uint32_t read_ahead;
    Wait wait;
    int lanes;

    static Plan of(uint64_t seed, int lanes) {
        Random r{seed};
        Plan p{};
        p.seed = seed;
        p.lanes = lanes;
        p.capacity = kMinCapacity << r.below(r.one_in(3) ? 13 : 6);
        p.slots = kMinSlots << r.below(r.one_in(2) ? 4 : 12);
        const uint64_t most = p.capacity / 2;
        p.largest = r.one_in(3) ? std::min<uint64_t>(most, 100) : r.one_in(2) ? most : most / 8;
        p.kill_producer = 200 << r.below(8);  // one message in so many is a producer's last
        p.kill_consumer = r.one_in(4) ? 0 : 50 << r.below(8);
        p.hold = r.one_in(2) ? 0 : 1 + r.below(8);
        p.pace = r.one_in(3) ? 1 + r.below(50) : 0;  // now and then a pause, so that the consumer gets to sleep
        p.dawdle = r.one_in(2) ? 0 : 20 << r.below(8);  // one step in so many takes its time
        p.read_ahead = r.one_in(3) ? uint32_t(1 + r.below(16)) : 0;
        p.wait = r.one_in(3) ? Wait{0, false} : r.one_in(2) ? Wait{} : Wait{300'000, false};
        return p;
    }

    uint32_t length(int lane, uint64_t k) const {
        Random r{seed ^ (uint64_t(lane) << 56) ^ k};
        const uint64_t bits = r.below(65 - uint64_t(std::countl_zero(largest)));
        return uint32_t(std::min(largest, r.below((uint64_t(2) << bits) - 1)));
    }

    // The bytes of a message, written or compared eight at a time.
    template <class Word>
    static void each_word(const Plan &p, int lane, uint64_t k, uint32_t length, Word &&word) {
        Random r{~p.seed ^ (uint64_t(lane) << 48) ^ k};
        for (uint32_t at = 0; at < length; at += 8) {
            const uint64_t value = r.next();
            word(at, std::min<uint32_t>(8, length - at), value);
        }
    }

    void print(FILE *to) const {
        std::fprintf(to, "round seed=%" PRIu64 " capacity=%" PRIu64 " slots=%" PRIu64 " largest=%" PRIu64
                     " kill_producer=1/%" PRIu64 " kill_consumer=1/%" PRIu64 " hold=1/%" PRIu64 " dawdle=1/%" PRIu64 " read_ahead=%u spin=%" PRIu64
                     "%s\n",
                     seed, capacity, slots, largest, kill_producer, kill_consumer, hold, dawdle, read_ahead, wait.max_spin_ns,
                     wait.adaptive ? "a" : "");
    }
};

struct Mark {
    std::atomic<uint16_t> drained_by;  // which of the consumers had it last; 0: none
    std::atomic<uint8_t> releasing, released;
    std::atomic<uint8_t> died;  // 1 + index into deaths would not fit: the audit looks it up
};

struct Lane {
    std::atomic<uint64_t> begun, finished;  // message numbers, from 1
    std::atomic<uint32_t> step;             // the last fault point passed in message `begun`
    std::atomic<int> end;                   // of the present incarnation (threads): an Ending
    Mark marks[kPerLane + 1];
};

struct Death {
    int lane, pid;
    uint64_t message;
    int step;        // -1: before the first
    bool by_itself;  // then `step` is exact
    bool finished;
};

struct Ledger {
    std::atomic<int> stop, producers_done, failed, stop_consumer;
    std::atomic<uint64_t> drained, redelivered, held;
    std::atomic<int> skip_count;
    std::atomic<int> skip_pids[kMaxDeaths];
    std::atomic<Seq> skip_seqs[kMaxDeaths];
    Lane lanes[kMaxLanes];

    static Ledger *make() {
        void *p = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) std::abort();
        return static_cast<Ledger *>(p);  // all zero
    }
    static void unmake(Ledger *l) { munmap(l, sizeof(Ledger)); }
};

struct Failed {};
struct Died {};  // a thread's death

[[gnu::format(printf, 2, 3)]] inline void fail(Ledger &l, const char *format, ...) {
    va_list args;
    va_start(args, format);
    char text[512];
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    std::fprintf(stderr, "FAILED: %s\n", text);
    l.failed.store(1);
    throw Failed{};
}

// How the running process or thread dies, and when.
struct Fate {
    int at = -1;  // a Step, or kMidCopy
    std::atomic<uint32_t> *step = nullptr;
    void (*die)() = nullptr;
    uint64_t dawdle = 0;
    Random luck{0};
};
constexpr int kMidCopy = 100;
inline thread_local Fate fate;

inline void pass(int step) {
    if (fate.step && step <= int(Step::woken)) fate.step->store(uint32_t(step) + 1, std::memory_order_relaxed);
    if (fate.luck.one_in(fate.dawdle)) std::this_thread::sleep_for(std::chrono::microseconds(fate.luck.below(100)));
    if (fate.at == step) {
        fate.at = -1;
        fate.die();
    }
}
inline void install_faults() {
    fault_hook = [](Step s) { pass(int(s)); };
}

// A producer's life: writes the lane's messages from where its predecessor ended.
inline void produce(const Plan &plan, Ledger &ledger, int lane_index, Control &control, os::Identity self, uint64_t luck) {
    Lane &lane = ledger.lanes[lane_index];
    Random r{luck};
    Producer producer;
    while (!producer.attach(control, self)) std::this_thread::yield();
    fate.step = &lane.step;
    fate.dawdle = plan.dawdle;
    fate.luck = Random{luck + 1};
    for (uint64_t k = lane.begun.load() + 1; k <= kPerLane && !ledger.stop.load(std::memory_order_relaxed); ++k) {
        if (plan.pace && r.one_in(1000 / plan.pace)) std::this_thread::sleep_for(std::chrono::microseconds(r.below(300)));
        if (r.one_in(plan.kill_producer)) {
            const int steps[] = {int(Step::named),  int(Step::opened), int(Step::reserved),  int(Step::flush_reserved), int(Step::flushed),
                                 int(Step::copied), int(Step::headed), int(Step::committed), int(Step::woken),          kMidCopy};
            fate.at = steps[r.below(std::size(steps))];
        }
        const uint32_t length = plan.length(lane_index, k);
        const uint32_t target = uint32_t(lane_index) << 24 | uint32_t(k);
        lane.step.store(0);
        lane.begun.store(k);
        auto fill = [&](std::byte *to) {
            Plan::each_word(plan, lane_index, k, length, [&](uint32_t at, uint32_t n, uint64_t value) {
                if (at >= length / 2 && at < length / 2 + 8) pass(kMidCopy);
                std::memcpy(to + at, &value, n);
            });
        };
        while (!producer.try_put(target, length, fill)) {
            producer.wait_for_room(length, 20'000'000);
            if (ledger.failed.load()) throw Failed{};
        }
        lane.finished.store(k);
    }
    fate = {};
    producer.detach();
}

// A consumer's life: until all is read, or it is told to leave (true: left with work to do).
inline bool consume(const Plan &plan, Ledger &ledger, Control &control, os::Identity self, uint16_t life, uint64_t luck) {
    struct Pending { int lane; uint64_t k; };
    struct Held { Taken taken; Pending what; };
    Random r{luck};
    fate.dawdle = plan.dawdle;
    fate.luck = Random{luck + 1};
    Consumer consumer;
    while (consumer.attach(control, self, plan.read_ahead, plan.wait) != 0) std::this_thread::yield();
    std::vector<uint64_t> last(kMaxLanes, 0);
    std::vector<Pending> pending;
    std::vector<Held> held;
    std::vector<Taken> taken(256);

    auto check_bytes = [&](const Taken &t, Pending w, const char *when) {
        if (t.length != plan.length(w.lane, w.k))
            fail(ledger, "%s: lane %d message %" PRIu64 " has length %u", when, w.lane, w.k, t.length);
        Plan::each_word(plan, w.lane, w.k, t.length, [&](uint32_t at, uint32_t n, uint64_t value) {
            if (std::memcmp(t.data + at, &value, n) != 0)
                fail(ledger, "%s: lane %d message %" PRIu64 " is damaged at byte %u of %u", when, w.lane, w.k, at, t.length);
        });
    };
    auto mark = [&](Pending w) -> Mark & { return ledger.lanes[w.lane].marks[w.k]; };
    auto release_one_held = [&] {
        std::swap(held[r.below(held.size())], held.back());
        const Held h = held.back();
        held.pop_back();
        check_bytes(h.taken, h.what, "while held");
        mark(h.what).releasing.store(1);
        consumer.release_held(h.taken.seq);
        mark(h.what).released.store(1);
    };

    for (;;) {
        if (ledger.failed.load()) throw Failed{};
        if (r.one_in(plan.kill_consumer)) {
            const int steps[] = {int(Step::marked), int(Step::published), int(Step::room_called), kMidCopy};
            fate.at = steps[r.below(std::size(steps))];
        }
        const size_t n = consumer.collect(std::span(taken).first(1 + r.below(taken.size())));
        for (const Skipped &s : consumer.take_skips()) {
            const int i = ledger.skip_count.fetch_add(1);
            if (i >= kMaxDeaths) continue;
            ledger.skip_pids[i].store(s.pid);
            ledger.skip_seqs[i].store(s.seq);
        }
        for (size_t i = 0; i < n; ++i) {
            const Taken &t = taken[i];
            const Pending w{int(t.target >> 24), t.target & 0xffffff};
            if (w.lane >= plan.lanes || w.k == 0 || w.k > ledger.lanes[w.lane].begun.load())
                fail(ledger, "a message nobody wrote: target %x length %u seq %u", t.target, t.length, t.seq);
            check_bytes(t, w, "drained");
            if (w.k <= last[w.lane])
                fail(ledger, "lane %d: message %" PRIu64 " after %" PRIu64, w.lane, w.k, last[w.lane]);
            last[w.lane] = w.k;
            Mark &m = mark(w);
            if (m.released.load()) fail(ledger, "lane %d: message %" PRIu64 " came again after its release", w.lane, w.k);
            if (m.drained_by.exchange(life) != 0) ledger.redelivered.fetch_add(1, std::memory_order_relaxed);
            if (r.one_in(plan.hold)) {
                consumer.hold(t.seq);
                held.push_back({t, w});
                ledger.held.fetch_add(1, std::memory_order_relaxed);
            } else {
                pending.push_back(w);
            }
            if (i == n / 2) pass(kMidCopy);  // a death between drain and release
        }
        ledger.drained.fetch_add(n, std::memory_order_relaxed);
        while (!held.empty() && (held.size() > plan.slots / 8 || r.one_in(4) || n == 0)) release_one_held();
        if (n == 0 || r.one_in(2)) {
            for (const Pending &w : pending) mark(w).releasing.store(1, std::memory_order_relaxed);
            consumer.release_copies();
            for (const Pending &w : pending) mark(w).released.store(1, std::memory_order_relaxed);
            pending.clear();
        }
        if (n > 0) continue;
        const bool all_written = ledger.producers_done.load();
        if (all_written && control.released.load() == control.reserved.load()) break;
        if (ledger.stop_consumer.exchange(0)) {
            consumer.detach();
            return true;
        }
        consumer.wait(all_written ? 1'000'000 : 200'000'000);
    }
    fate = {};
    consumer.detach();
    return false;
}

struct Totals {
    uint64_t rounds = 0, messages = 0, producer_deaths = 0, consumer_deaths = 0, restarts = 0, skips = 0, flushes = 0,
             redelivered = 0, held = 0, stalled = 0, stops = 0;
    void print() const {
        std::printf("ok: %" PRIu64 " rounds, %" PRIu64 " messages, %" PRIu64 " producers and %" PRIu64 " consumers killed, %" PRIu64
                    " graceful restarts, %" PRIu64 " skips, %" PRIu64 " wraps, %" PRIu64 " redelivered, %" PRIu64 " held, %" PRIu64
                    " stalled, %" PRIu64 " stopped\n",
                    rounds, messages, producer_deaths, consumer_deaths, restarts, skips, flushes, redelivered, held, stalled, stops);
    }
};

// At the end of a round, with everybody gone and the ring empty.
inline void audit(const Plan &plan, Ledger &ledger, Control &control, const std::vector<Death> &deaths, Totals &totals) {
    std::vector<bool> skipped(deaths.size());
    std::set<Seq> slots_skipped;  // a consumer that died before it released a skip leaves it to be reported again
    const int skips = std::min(ledger.skip_count.load(), kMaxDeaths);
    for (int i = 0; i < skips; ++i) {
        slots_skipped.insert(ledger.skip_seqs[i].load());
        bool known = false;
        for (size_t d = 0; d < deaths.size(); ++d)
            if (deaths[d].pid == ledger.skip_pids[i].load()) known = skipped[d] = true;
        if (!known) fail(ledger, "a slot of living producer %d was skipped", ledger.skip_pids[i].load());
    }
    std::vector<std::vector<bool>> excused(plan.lanes, std::vector<bool>(kPerLane + 2));
    size_t must_skip = 0, may_skip = 0;
    for (size_t i = 0; i < deaths.size(); ++i) {
        const Death &d = deaths[i];
        if (skipped[i] && d.finished) fail(ledger, "producer %d died between messages, and yet was skipped", d.pid);
        if (d.finished || d.message == 0) continue;
        excused[d.lane][d.message] = true;
        const bool read = ledger.lanes[d.lane].marks[d.message].drained_by.load() != 0;
        if (read && skipped[i])
            fail(ledger, "lane %d message %" PRIu64 " was both read and skipped (step %d)", d.lane, d.message, d.step);
        if (!d.by_itself) {
            may_skip += !read;
            continue;
        }
        const bool whole = d.step == int(Step::committed) || d.step == int(Step::woken);
        if (read != whole)
            fail(ledger, "lane %d message %" PRIu64 ": its producer died at step %d and it was %s", d.lane, d.message, d.step,
                 read ? "read" : "not read");
        must_skip += d.step == int(Step::reserved) || d.step == int(Step::flush_reserved) ||
                     d.step == int(Step::copied) || d.step == int(Step::headed);
        // One that died competing for a slot may be named for another that died holding it, so these only count.
        if (skipped[i] && (whole || d.step == int(Step::flushed)))
            fail(ledger, "producer %d died at step %d, holding nothing, and was skipped", d.pid, d.step);
    }
    if (slots_skipped.size() < must_skip || slots_skipped.size() > must_skip + may_skip)
        fail(ledger, "%zu slots were skipped; %zu to %zu were held by the dead", slots_skipped.size(), must_skip, must_skip + may_skip);
    for (int lane = 0; lane < plan.lanes; ++lane) {
        Lane &l = ledger.lanes[lane];
        for (uint64_t k = 1; k <= l.begun.load(); ++k) {
            const Mark &m = l.marks[k];
            const bool read = m.drained_by.load() != 0;
            if (!read && !excused[lane][k]) fail(ledger, "lane %d: message %" PRIu64 " is lost", lane, k);
            if (read && !m.released.load() && !m.releasing.load())
                fail(ledger, "lane %d: message %" PRIu64 " was drained, never released, and never came again", lane, k);
            totals.messages += read;
        }
    }
    uint64_t wraps = 0;
    for (const Cell &c : control.cells) {
        wraps += c.flushes.load();
        if (c.identity.load() != 0 && !is_dead(c.identity.load())) fail(ledger, "a producer's place was left taken");
    }
    totals.rounds += 1;
    totals.flushes += wraps;
    totals.skips += uint64_t(skips);
    totals.redelivered += ledger.redelivered.load();
    totals.held += ledger.held.load();
    totals.stalled += control.stalled.load();
}

inline void dump(const Ledger &ledger, Control &c, const Plan &plan) {
    const Descriptor reserved = Descriptor::unpack(c.reserved.load()), released = Descriptor::unpack(c.released.load());
    plan.print(stderr);
    std::fprintf(stderr, "reserved %u@%" PRIu64 " released %u@%" PRIu64 " doorbell %u room_wanted %u consumer pid %d drained %" PRIu64 "\n",
                 reserved.seq, reserved.pos, released.seq, released.pos, c.doorbell.load(), c.room_wanted.load(),
                 os::pid_of(c.consumer.load()), ledger.drained.load());
    for (uint32_t i = 0; i < kMaxProducers; ++i)
        if (c.cells[i].identity.load())
            std::fprintf(stderr, "cell %u pid %d %s intent %" PRIx64 "\n", i, os::pid_of(c.cells[i].identity.load()),
                         is_dead(c.cells[i].identity.load()) ? "dead" : "alive", c.cells[i].intent.load());
    for (uint32_t n = 0; n < std::min<uint32_t>(distance(released.seq, reserved.seq) + 2, 16); ++n) {
        const uint64_t w = c.heads()[after(released.seq, n) & (c.slots - 1)].word.load();
        std::fprintf(stderr, "slot %u: seq %u status %u start %u\n", after(released.seq, n), seq_of(w), unsigned(status_of(w)), start_of(w));
    }
    for (int i = 0; i < plan.lanes; ++i)
        std::fprintf(stderr, "lane %d: begun %" PRIu64 " finished %" PRIu64 " step %d\n", i, ledger.lanes[i].begun.load(),
                     ledger.lanes[i].finished.load(), int(ledger.lanes[i].step.load()) - 1);
}

// Nothing begun, drained or finished for so long means that everybody waits for somebody.
class Watchdog {
  public:
    bool barks(const Ledger &l, int lanes) {
        uint64_t now = l.drained.load() + uint64_t(l.skip_count.load());
        for (int i = 0; i < lanes; ++i) now += l.lanes[i].begun.load() + l.lanes[i].finished.load();
        if (now != seen_ || since_ == 0) {
            seen_ = now;
            since_ = os::now_ns();
        }
        return os::now_ns() - since_ > 30'000'000'000u;
    }

  private:
    uint64_t seen_ = 0, since_ = 0;
};

struct Options {
    double seconds = 10, round_seconds = 0.7;
    uint64_t seed = 0;
    int producers = 8;
    uint64_t round = 0;  // replay this one

    static Options parse(int argc, char **argv) {
        Options o;
        o.seed = os::now_ns();
        for (int i = 1; i + 1 < argc; i += 2) {
            const std::string name = argv[i];
            if (name == "--seconds") o.seconds = std::atof(argv[i + 1]);
            else if (name == "--seed") o.seed = std::strtoull(argv[i + 1], nullptr, 10);
            else if (name == "--producers") o.producers = std::clamp(std::atoi(argv[i + 1]), 1, kMaxLanes);
            else if (name == "--round") o.round = std::strtoull(argv[i + 1], nullptr, 10);
            else {
                std::fprintf(stderr, "usage: %s [--seconds S] [--seed N] [--producers P] [--round SEED]\n", argv[0]);
                std::exit(2);
            }
        }
        return o;
    }
};

// Rounds until the time is up; `run(plan, totals)` throws Failed.
inline int campaign(const Options &o, const std::function<void(const Plan &, Totals &)> &run) {
    Random seeds{o.seed};
    Totals totals;
    const uint64_t end = os::now_ns() + uint64_t(o.seconds * 1e9);
    std::printf("seed %" PRIu64 "\n", o.seed);
    do {
        const Plan plan = Plan::of(o.round ? o.round : seeds.next(), o.producers);
        try {
            run(plan, totals);
        } catch (const Failed &) {
            plan.print(stderr);
            std::fprintf(stderr, "replay with --round %" PRIu64 "\n", plan.seed);
            return 1;
        }
    } while (os::now_ns() < end);
    totals.print();
    return 0;
}

}  // namespace torture
