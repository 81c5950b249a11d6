// Tortures a ring with threads, for the sanitizers: a death is a thread that leaves in the middle of a write or a
// release and never comes back. See campaign.hpp for what is checked.
#include "campaign.hpp"

using namespace torture;

namespace {

enum Ending { kRunning, kFinished, kDead, kLeft, kFailed };

// Threads have numbers for pids, and a flag each that says they are gone.
constexpr int kMostThreads = 1 << 16;
std::atomic<bool> gone[kMostThreads];
int born = 0;

struct Worker {
    std::thread thread;
    std::atomic<int> ending{kRunning};
    int number = 0;

    template <class Life>
    void start(Life life) {
        ending.store(kRunning);
        number = ++born;
        if (number >= kMostThreads) std::abort();
        thread = std::thread([this, life, self = os::make_identity(number, 1)] {
            fate = {};
            fate.die = [] { throw Died{}; };
            int how;
            try {
                how = life(self);
            } catch (const Died &) {
                how = kDead;
            } catch (const Failed &) {
                how = kFailed;
            }
            fate = {};
            gone[os::pid_of(self)].store(true, std::memory_order_release);
            ending.store(how);
        });
    }
    int ended() {  // an Ending, once
        const int how = ending.load();
        if (how == kRunning || !thread.joinable()) return kRunning;
        thread.join();
        return how;
    }
};

void run_round(const Plan &plan, Totals &totals, double seconds) {
    Segment segment = Segment::create(plan.capacity, plan.slots, "/dev/shm");
    Control &control = segment.control();
    std::unique_ptr<Ledger, void (*)(Ledger *)> ledger_owner(Ledger::make(), Ledger::unmake);
    Ledger &ledger = *ledger_owner;
    Random r{plan.seed + 1};
    std::vector<Worker> producers(plan.lanes);
    std::vector<Death> deaths;
    Worker consumer;
    uint16_t life = 0;
    int running = plan.lanes;
    bool reading = true;

    auto start_producer = [&](int lane) {
        producers[lane].start([&, lane, luck = r.next()](os::Identity self) {
            produce(plan, ledger, lane, control, self, luck);
            return int(kFinished);
        });
    };
    auto start_consumer = [&] {
        ++life;
        consumer.start([&, life, luck = r.next()](os::Identity self) {
            return int(consume(plan, ledger, control, self, life, luck) ? kLeft : kFinished);
        });
    };

    start_consumer();
    for (int lane = 0; lane < plan.lanes; ++lane) start_producer(lane);
    const uint64_t end = os::now_ns() + uint64_t(seconds * 1e9);
    Watchdog dog;
    bool bad = false;
    while (reading || running > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        const bool over = os::now_ns() >= end || deaths.size() > kMaxDeaths / 2 || life > 2000;
        if (over) ledger.stop.store(1);
        for (int lane = 0; lane < plan.lanes; ++lane) {
            const int how = producers[lane].ended();
            if (how == kRunning) continue;
            if (how == kDead) {
                ++totals.producer_deaths;
                const Lane &l = ledger.lanes[lane];
                deaths.push_back({lane, producers[lane].number, l.begun.load(), int(l.step.load()) - 1, true,
                                  l.finished.load() == l.begun.load()});
            }
            if (how == kDead && !over && !bad) start_producer(lane);
            else --running;
        }
        if (const int how = consumer.ended(); how != kRunning) {
            totals.consumer_deaths += how == kDead;
            totals.restarts += how == kLeft;
            if ((how == kDead || how == kLeft) && !bad) start_consumer();
            else reading = false;
        }
        bad = ledger.failed.load();
        if (running == 0) ledger.producers_done.store(1);
        if (!over && r.one_in(60)) ledger.stop_consumer.store(1);
        if (!bad && dog.barks(ledger, plan.lanes)) {
            dump(ledger, control, plan);
            std::fprintf(stderr, "FAILED: nothing moves\nreplay with --round %" PRIu64 "\n", plan.seed);
            std::_Exit(1);  // threads that wait for ever cannot be joined
        }
    }
    if (bad) throw Failed{};
    audit(plan, ledger, control, deaths, totals);
}

}  // namespace

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    install_faults();
    is_dead = [](os::Identity id) { return gone[os::pid_of(id)].load(std::memory_order_acquire); };
    const Options o = Options::parse(argc, argv);
    return campaign(o, [&](const Plan &plan, Totals &totals) { run_round(plan, totals, o.round_seconds); });
}
