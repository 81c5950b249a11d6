// Checks what a consumer's waiting goes by, on made-up arrivals: no clock, no sleep. Exits with 1 and says what is wrong.
#include "rhythm.hpp"

#include <cstdio>
#include <random>

using penstock::Rhythm;

namespace {

constexpr uint64_t kMost = 150'000, kWake = 50'000;
int wrong = 0;

void check(bool right, const char *what) {
    if (!right) std::printf("wrong: %s\n", what), ++wrong;
}

struct Seen {
    int slept_for = 0, looked_for = 0, missed = 0, alert = 0;
    uint64_t looked_ns = 0, passed_ns = 0;
};

// A consumer that does as it is told, with timers and wake-ups that are `kWake` late, while messages come `gaps` apart.
template <class Gaps>
Seen live(Gaps gaps, int messages, Rhythm &rhythm) {
    Seen seen;
    uint64_t now = 1'000'000'000, at = now;
    rhythm.begin(now);
    for (int i = 0; i < messages; ++i) {
        at += gaps(i);
        const uint64_t began = now;
        const Rhythm::Watch watch = rhythm.watch(now, kMost);
        if (watch.sleep_until > now) {
            ++seen.alert;
            if (at < watch.sleep_until) {  // woken by it
                now = at + kWake;
                ++seen.slept_for;
            } else {
                now = watch.sleep_until + kWake;
                rhythm.woke(watch.sleep_until, now);
            }
        }
        if (now < at || now == began) {
            const uint64_t look_from = now, until = std::max(watch.look_until, now);
            if (at <= until) {
                now = std::max(now, at);
                ++seen.looked_for;
            } else {
                now = std::max(until, at) + kWake;
                ++(watch.look_until > look_from ? seen.missed : seen.slept_for);
            }
            seen.looked_ns += std::min(now, until) - look_from;
        }
        seen.passed_ns += now - began;
        rhythm.arrived(1, now);
    }
    return seen;
}

}  // namespace

int main() {
    std::mt19937_64 random(1);
    {
        Rhythm rhythm;
        const Seen seen = live([](int) { return 20'000; }, 2000, rhythm);
        check(seen.looked_for > 1900 && seen.alert < 50, "quick messages are looked for");
    }
    {
        Rhythm rhythm;
        std::normal_distribution<double> jitter(0, 3'000);
        const Seen seen = live([&](int) { return uint64_t(333'000 + jitter(random)); }, 2000, rhythm);
        check(seen.looked_for > 1800, "a beat is looked for when it is due");
        check(seen.looked_ns < seen.passed_ns / 4, "a beat is slept through in between");
    }
    {
        Rhythm rhythm;
        const Seen seen = live([](int i) { return i % 100 == 99 ? 5'000'000 : 400'000; }, 4000, rhythm);
        check(seen.looked_for > 3000, "a beat is found again after a pause");
    }
    {
        Rhythm rhythm;
        std::exponential_distribution<double> gap(1.0 / 333'000);
        const Seen seen = live([&](int) { return uint64_t(gap(random)); }, 4000, rhythm);
        check(seen.looked_ns < seen.passed_ns / 10, "messages without a beat are slept for");
    }
    for (const uint64_t slow : {2'000'000, 50'000'000}) {
        Rhythm rhythm;
        const Seen seen = live([&](int) { return slow; }, 500, rhythm);
        check(seen.alert == 0 && seen.looked_ns == 0, "slow messages are slept for");
    }
    {
        Rhythm rhythm;
        for (uint64_t now = 1'000'000'000, i = 0; i < 500; ++i) rhythm.arrived(5, now += 2'000'000);
        const Rhythm::Watch watch = rhythm.watch(2'000'000'000, kMost);
        check(watch.sleep_until == 0 && watch.look_until == 0, "bunches have no beat");
    }
    {
        Rhythm rhythm;
        uint64_t now = 1'000'000'000;
        rhythm.begin(now);
        check(rhythm.gather_until() == 0, "the first message is not waited for");
        for (int i = 0; i < 200; ++i) rhythm.arrived(10, now += 1'000);
        check(rhythm.gather_until() > now && rhythm.gather_until() <= now + Rhythm::kLongestGather, "a flood gathers");
        for (int i = 0; i < 20; ++i) rhythm.arrived(1, now += 10'000);
        check(rhythm.gather_until() == 0, "a stream does not gather");
    }
    std::printf(wrong ? "%d wrong\n" : "ok\n", wrong);
    return wrong != 0;
}
