// A minimal test framework: a failed CHECK prints its location and expression, and the program exits with status 1.
//
//   TEST(name) { CHECK(1 + 1 == 2); CHECK_THROWS(std::out_of_range, at(9)); }
//   int main() { return kvtier::test::run(); }
#pragma once

#include <cstdio>
#include <exception>
#include <vector>

namespace kvtier::test {

struct Case {
    const char* name;
    void (*body)();
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

inline int& failures() {
    static int count = 0;
    return count;
}

inline void fail(const char* file, int line, const char* what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
    ++failures();
}

struct Register {
    Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

// Run all test cases in order of definition; return the exit status.
inline int run() {
    for (const Case& test : cases()) {
        const int before = failures();
        try {
            test.body();
        } catch (const std::exception& error) {
            fail(test.name, 0, error.what());
        }
        std::printf("%s %s\n", failures() == before ? "ok    " : "FAILED", test.name);
    }
    return failures() == 0 ? 0 : 1;
}

}  // namespace kvtier::test

#define TEST(name)                                                  \
    static void test_##name();                                      \
    static const kvtier::test::Register register_##name(#name, &test_##name); \
    static void test_##name()

#define CHECK(...) \
    ((__VA_ARGS__) ? void() : kvtier::test::fail(__FILE__, __LINE__, #__VA_ARGS__))

#define CHECK_THROWS(error, ...)                                                   \
    do {                                                                           \
        bool thrown = false;                                                       \
        try {                                                                      \
            static_cast<void>(__VA_ARGS__);                                        \
        } catch (const error&) {                                                   \
            thrown = true;                                                         \
        }                                                                          \
        if (!thrown) kvtier::test::fail(__FILE__, __LINE__, "did not throw " #error ": " #__VA_ARGS__); \
    } while (false)
