// Tortures a ring with processes: producers and consumers that kill themselves at chosen steps, are killed or
// stopped at any instant, and are replaced. See campaign.hpp for what is checked.
#include <csignal>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "campaign.hpp"

using namespace torture;

namespace {

constexpr int kLeft = 3;  // exit code of a consumer that was asked to leave

[[noreturn]] void kill_self() {
    raise(SIGKILL);
    for (;;) pause();
}

template <class Life>
pid_t spawn(Life &&life) {
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid != 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(0);
    fate = {};
    fate.die = kill_self;
    int code = 1;
    try {
        code = life(os::self_identity());
    } catch (const Failed &) {
    }
    std::fflush(stderr);
    _exit(code);
}

void run_round(const Plan &plan, Totals &totals, double seconds) {
    Segment segment = Segment::create(plan.capacity, plan.slots, "/dev/shm");
    Control &control = segment.control();
    std::unique_ptr<Ledger, void (*)(Ledger *)> ledger_owner(Ledger::make(), Ledger::unmake);
    Ledger &ledger = *ledger_owner;
    Random r{plan.seed + 1};
    std::vector<pid_t> producers(plan.lanes);
    std::vector<bool> killed_by_us(plan.lanes);
    std::vector<Death> deaths;
    pid_t consumer = 0;
    uint16_t life = 0;
    int running = plan.lanes;

    auto start_producer = [&](int lane) {
        killed_by_us[lane] = false;
        producers[lane] = spawn([&, luck = r.next()](os::Identity self) {
            produce(plan, ledger, lane, control, self, luck);
            return 0;
        });
    };
    auto start_consumer = [&] {
        ++life;
        consumer = spawn([&, luck = r.next()](os::Identity self) {
            return consume(plan, ledger, control, self, life, luck) ? kLeft : 0;
        });
    };
    auto end_all = [&] {
        for (pid_t p : producers)
            if (p > 0) kill(p, SIGKILL), waitpid(p, nullptr, 0);
        if (consumer > 0) kill(consumer, SIGKILL), waitpid(consumer, nullptr, 0);
    };

    start_consumer();
    for (int lane = 0; lane < plan.lanes; ++lane) start_producer(lane);
    const uint64_t end = os::now_ns() + uint64_t(seconds * 1e9);
    Watchdog dog;
    try {
        while (consumer > 0) {
            usleep(500);
            const bool over = os::now_ns() >= end || deaths.size() > kMaxDeaths / 2 || life > 2000;
            if (over) ledger.stop.store(1);
            int status;
            for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
                const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
                const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
                if (pid == consumer) {
                    consumer = 0;
                    if (killed) ++totals.consumer_deaths;
                    else if (code == kLeft) ++totals.restarts;
                    else if (code != 0) fail(ledger, "the consumer ended with status %x", status);
                    if (killed || code == kLeft) start_consumer();
                    continue;
                }
                const int lane = int(std::find(producers.begin(), producers.end(), pid) - producers.begin());
                producers[lane] = 0;
                if (!killed && code != 0) fail(ledger, "a producer ended with status %x", status);
                if (killed) {
                    ++totals.producer_deaths;
                    const Lane &l = ledger.lanes[lane];
                    deaths.push_back({lane, pid, l.begun.load(), int(l.step.load()) - 1, !killed_by_us[lane],
                                      l.finished.load() == l.begun.load()});
                }
                if (killed && !over) start_producer(lane);
                else --running;
            }
            if (ledger.failed.load()) throw Failed{};
            if (running == 0) ledger.producers_done.store(1);
            if (over) {
            } else if (r.one_in(30)) {  // any instant may be the last
                const int lane = int(r.below(plan.lanes));
                if (producers[lane] > 0 && !killed_by_us[lane]) {
                    killed_by_us[lane] = true;
                    kill(producers[lane], SIGKILL);
                }
            } else if (plan.kill_consumer && r.one_in(60)) {
                kill(consumer, SIGKILL);
            } else if (r.one_in(60)) {
                ledger.stop_consumer.store(1);
            } else if (r.one_in(25)) {  // slow is not dead
                const pid_t slow = producers[r.below(plan.lanes)];
                if (slow > 0) {
                    ++totals.stops;
                    kill(slow, SIGSTOP);
                    usleep(useconds_t(r.below(30'000)));
                    kill(slow, SIGCONT);
                }
            }
            if (dog.barks(ledger, plan.lanes)) {
                dump(ledger, control, plan);
                fail(ledger, "nothing moves");
            }
        }
        audit(plan, ledger, control, deaths, totals);
    } catch (const Failed &) {
        end_all();
        throw;
    }
}

}  // namespace

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    install_faults();
    const Options o = Options::parse(argc, argv);
    return campaign(o, [&](const Plan &plan, Totals &totals) { run_round(plan, totals, o.round_seconds); });
}
