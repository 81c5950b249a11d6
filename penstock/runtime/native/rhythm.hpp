// Estimates when the next message comes, and decides how a consumer waits for it: by looking (spinning), by sleeping,
// or by sleeping until shortly before that time and then looking.
//
// To wake a sleeping consumer takes tens of microseconds, which is most of the time that a message is on its way. A
// consumer that looks finds the message at once, but costs a core. So where messages come quickly one after the other,
// the consumer looks for about as long as they are apart. Where slower messages come in a steady beat, it sleeps, on a
// timer that ends as much too early as timers were late so far, and looks around the time at which the message is due.
// In all other cases it sleeps.
//
// This code never waits and reads no clock: its caller gives it the times. Each consumer has its own Rhythm, so nothing
// is shared between threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace penstock {

// A running mean and the mean distance from it, which TCP computes alike for round trips. No single value counts as
// further away than `most`.
struct Running {
    int64_t mean, deviation;

    void add(int64_t value, int64_t most) {
        const int64_t off = value - mean;
        mean += off / 8;
        deviation += (std::min(off < 0 ? -off : off, most) - deviation) / 4;
    }
};

class Rhythm {
  public:
    static constexpr uint64_t kQuickGap = 100'000;      // messages closer than this make looking worth while
    static constexpr uint64_t kLeastLook = 20'000;
    static constexpr uint64_t kLongestGap = 1'000'000;  // a night of silence must not blunt the averages
    static constexpr uint64_t kSlack = 10'000;          // a beat or a timer may always be off by this much
    static constexpr uint64_t kLatest = 100'000;        // a timer that is later than this counts as this late
    static constexpr int64_t kFlood = 500;
    static constexpr uint64_t kGather = 64, kLongestGather = 5'000;  // messages, ns

    // Sleep until `sleep_until`, then look until `look_until`. A time that has passed means: do not sleep, or do not
    // look.
    struct Watch {
        uint64_t sleep_until, look_until;
    };

    void begin(uint64_t now) { last_ = now; }

    // To be called when `n` messages were found.
    void arrived(size_t n, uint64_t now) {
        const uint64_t gap = std::min((now - last_) / n, kLongestGap);
        gap_.add(int64_t(gap), gap_.mean / 8);
        if (n > 1) gap_.deviation = gap_.mean;  // it is not known when each of them came, so there is no beat
        last_ = now;
    }

    // To be called when a sleep that should have ended at `due` ended at `now`. A message may have ended the sleep, but
    // only a sleep that was late.
    void woke(uint64_t due, uint64_t now) { late_.add(int64_t(std::min(now - due, kLatest)), kLatest); }

    // Until when a consumer should not look, because messages come in a flood; 0: there is no flood. Each look takes
    // the cache line that a producer is about to write from that producer, so that looking for every single message
    // costs both sides more than the messages do.
    uint64_t gather_until() const {
        return gap_.mean > kFlood ? 0 : last_ + std::min(kGather * uint64_t(gap_.mean), kLongestGather);
    }

    Watch watch(uint64_t now, uint64_t most) const {
        const uint64_t gap = uint64_t(gap_.mean);
        if (gap <= kQuickGap) return {0, now + std::min(std::max(2 * gap, kLeastLook), most)};
        const uint64_t off = 2 * uint64_t(gap_.deviation) + kSlack;
        const uint64_t lead = uint64_t(late_.mean) + kSlack;
        // The whole time is spent looking only when the message is late. If it were a greater part of the gap, a slow
        // stream could cost a core.
        if (gap >= kLongestGap * 9 / 10 || lead + 2 * off > gap * 2 / 3 || most == 0) return {0, 0};
        return {last_ + gap - off - lead, last_ + gap + off};
    }

  private:
    Running gap_{int64_t(kLongestGap), 0};  // the time between messages
    Running late_{50'000, 0};               // by how much sleeps ended too late
    uint64_t last_ = 0;
};

}  // namespace penstock
