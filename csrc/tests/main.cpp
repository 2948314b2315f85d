// Runs the tests: native_tests [--level NAME] [--only PART_OF_A_NAME] [--except PART_OF_A_NAME] [--scale X] [--seed N]
#include <chrono>
#include <cmath>
#include <vector>

#include "harness.h"
#include "thread_pool.h"

namespace octavo::test {
namespace {

Test*& first_test() {
    static Test* first = nullptr;
    return first;
}
std::string g_case;
const char* g_test = "";
std::mt19937_64 g_engine;
uint64_t g_seed = 1;
double g_scale = 1.0;
int64_t g_cases = 0;

uint64_t hash(const char* text, uint64_t seed) {  // FNV-1a
    uint64_t h = 14695981039346656037u ^ seed;
    for (; *text; ++text) h = (h ^ static_cast<unsigned char>(*text)) * 1099511628211u;
    return h;
}

// Returns how many cases ran.
int64_t run(const Test& test, Isa isa) {
    g_test = test.name;
    g_case.clear();
    g_engine.seed(hash(test.name, hash(isa_name(isa), g_seed)));
    const int64_t before = g_cases;
    force_isa(isa);
    set_num_threads(2);
    test.body();
    return g_cases == before ? 1 : g_cases - before;
}

}  // namespace

Registration::Registration(const char* name, Runs runs, void (*body)()) {
    first_test() = new Test{name, runs, body, first_test()};
}

void fail(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s\n  in %s at level %s, --seed %llu\n  %s\n", file, line, what.c_str(), g_test,
                 isa_name(current_isa()), static_cast<unsigned long long>(g_seed), g_case.c_str());
    std::abort();
}
void describe_case(std::string text) { g_case = std::move(text); }
int cases(int usual) {
    const int count = std::max(1, static_cast<int>(usual * g_scale));
    g_cases += count;
    return count;
}
std::mt19937_64& random_engine() { return g_engine; }

void check_near(double actual, double expected, double tolerance, const char* file, int line, const std::string& what) {
    if (std::abs(actual - expected) <= tolerance) return;  // false if one is NaN
    fail(file, line,
         what + " is " + std::to_string(actual) + ", must be within " + std::to_string(tolerance) + " of " +
             std::to_string(expected));
}

}  // namespace octavo::test

int main(int argc, char** argv) {
    using namespace octavo;
    using namespace octavo::test;
    std::string level, only, except;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        if (option == "--level")
            level = argv[i + 1];
        else if (option == "--only")
            only = argv[i + 1];
        else if (option == "--except")
            except = argv[i + 1];
        else if (option == "--scale")
            g_scale = std::atof(argv[i + 1]);
        else if (option == "--seed")
            g_seed = std::strtoull(argv[i + 1], nullptr, 10);
        else
            argc = 0;
    }
    if (argc % 2 == 0 || (!level.empty() && isa_from_name(level.c_str()) == kNumIsas)) {
        std::fprintf(stderr,
                     "usage: native_tests [--level NAME] [--only PART_OF_A_NAME] [--except PART_OF_A_NAME] "
                     "[--scale X] [--seed N]\n");
        return 2;
    }
    const auto seconds_since = [](auto begin) {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    int64_t total = 0;
    const Isa best = current_isa();
    // kNumIsas stands for the tests that run only once.
    for (int isa = 0; isa <= kNumIsas; ++isa) {
        const bool once = isa == kNumIsas;
        if (!once &&
            (!isa_is_supported(static_cast<Isa>(isa)) || (!level.empty() && level != isa_name(static_cast<Isa>(isa)))))
            continue;
        const auto begin = std::chrono::steady_clock::now();
        int64_t count = 0, tests = 0;
        for (const Test* test = first_test(); test; test = test->next) {
            const std::string name = test->name;
            if ((test->runs == kOnce) != once || name.find(only) == std::string::npos) continue;
            if (!except.empty() && name.find(except) != std::string::npos) continue;
            count += run(*test, once ? best : static_cast<Isa>(isa));
            ++tests;
        }
        std::printf("%-14s %3lld tests %6lld cases %7.1f s\n", once ? "once" : isa_name(static_cast<Isa>(isa)),
                    static_cast<long long>(tests), static_cast<long long>(count), seconds_since(begin));
        std::fflush(stdout);
        total += count;
    }
    std::printf("passed: %lld cases\n", static_cast<long long>(total));
    return total ? 0 : 1;
}
