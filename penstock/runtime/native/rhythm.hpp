// When the next message is likely to come, and how a consumer waits for it: looking, sleeping, or sleeping until shortly
// before and then looking.
//
// Waking a sleeper takes tens of microseconds, which is most of what a message needs on its way; looking finds it at
// once and costs a core. So messages that come quickly one after the other are looked for about as long as they are
// apart. Slower ones that come in a steady beat are slept for, on a timer that is set as much too early as timers were
// late so far, and looked for around the time at which they are due. All others are slept for.
//
// Pure: times are given, nothing is waited for. One consumer's, so nothing is shared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace penstock {

// A running mean and the mean distance from it, as TCP keeps them of round trips; no single value counts as further away
// than `most`.
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
    static constexpr uint64_t kSlack = 10'000;          // by which a beat or a timer may be off without having been before
    static constexpr uint64_t kLatest = 100'000;        // a hiccup says nothing of timers
    static constexpr int64_t kFlood = 500;
    static constexpr uint64_t kGather = 64, kLongestGather = 5'000;  // messages, ns

    // Sleep until `sleep_until`, then look until `look_until`; a time that is over by then means: do not.
    struct Watch {
        uint64_t sleep_until, look_until;
    };

    void begin(uint64_t now) { last_ = now; }

    // `n` messages were found.
    void arrived(size_t n, uint64_t now) {
        const uint64_t gap = std::min((now - last_) / n, kLongestGap);
        gap_.add(int64_t(gap), gap_.mean / 8);
        if (n > 1) gap_.deviation = gap_.mean;  // when each of them came is not known: no beat
        last_ = now;
    }

    // A sleep that should have ended at `due` did so `now`. With a message there it may have been woken, but only because
    // it was late.
    void woke(uint64_t due, uint64_t now) { late_.add(int64_t(std::min(now - due, kLatest)), kLatest); }

    // Until when to leave a flood of messages alone (0: there is none): each look takes from a producer the memory that it
    // is about to write, so that looking for every message by itself costs both sides more than the messages do.
    uint64_t gather_until() const {
        return gap_.mean > kFlood ? 0 : last_ + std::min(kGather * uint64_t(gap_.mean), kLongestGather);
    }

    Watch watch(uint64_t now, uint64_t most) const {
        const uint64_t gap = uint64_t(gap_.mean);
        if (gap <= kQuickGap) return {0, now + std::min(std::max(2 * gap, kLeastLook), most)};
        const uint64_t off = 2 * uint64_t(gap_.deviation) + kSlack;
        const uint64_t lead = uint64_t(late_.mean) + kSlack;
        // Most of this is looked through only by a message that is late. More would be a core's price for little load.
        if (gap >= kLongestGap * 9 / 10 || lead + 2 * off > gap * 2 / 3 || most == 0) return {0, 0};
        return {last_ + gap - off - lead, last_ + gap + off};
    }

  private:
    Running gap_{int64_t(kLongestGap), 0};  // between messages
    Running late_{50'000, 0};               // a sleep's end behind its time
    uint64_t last_ = 0;
};

}  // namespace penstock
