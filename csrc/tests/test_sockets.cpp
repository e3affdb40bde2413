#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "kvtier/exchange.hpp"
#include "kvtier/pump.hpp"

using namespace kvtier::sockets;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto timeout = 30s;

struct Pair {
    Pair() {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::bad_alloc();
        here = ends[0];
        there = ends[1];
    }
    ~Pair() {
        close(here);
        if (there >= 0) close(there);
    }
    Pair(const Pair&) = delete;
    Pair& operator=(const Pair&) = delete;

    void send_text(const std::string& text) const {
        CHECK(write(there, text.data(), text.size()) == ssize_t(text.size()));
    }
    void hang_up() {
        close(there);
        there = -1;
    }

    int here = -1;
    int there = -1;
};

Span over(std::string& text) {
    return {reinterpret_cast<std::byte*>(text.data()), text.size()};
}

Progress converse(const Pair& pair, const std::vector<Operation>& operations, std::string& unread,
                  Clock::duration time = timeout) {
    return exchange(pair.here, operations, {over(unread).data, unread.size()}, Clock::now() + time);
}

bool is(const Progress& progress, std::size_t operations, std::size_t bytes, int error) {
    return progress.operations == operations && progress.bytes == bytes && progress.error == error;
}

std::string noise(std::mt19937& random, std::size_t length) {
    std::string text(length, '\0');
    std::generate(text.begin(), text.end(), [&] { return static_cast<char>(random()); });
    return text;
}

}  // namespace

TEST(a_request_and_its_reply) {
    const Pair pair;
    std::string request = "GET x\r\n", head = "$5\r\n", value(5, '.'), end = "\r\n", unread(16, '.');
    pair.send_text("$5\r\nhello\r\n+OK");
    CHECK(is(converse(pair,
                      {{Kind::send, {over(request)}},
                       {Kind::expect, {over(head)}},
                       {Kind::receive, {over(value)}},
                       {Kind::expect, {over(end)}}},
                      unread),
             4, 0, 0));
    CHECK(value == "hello");
    std::string asked(request.size(), '.'), rest(3, '.');
    CHECK(read(pair.there, asked.data(), asked.size()) == ssize_t(asked.size()) && asked == request);
    CHECK(read(pair.here, rest.data(), rest.size()) == 3 && rest == "+OK");
}

TEST(nothing_to_do) {
    const Pair pair;
    std::string empty, unread;
    CHECK(is(converse(pair, {}, unread), 0, 0, 0));
    const Operation receive{Kind::receive, {over(empty), over(empty)}};
    CHECK(is(converse(pair, {{Kind::send, {}}, receive, {Kind::expect, {over(empty)}}}, unread), 3, 0, 0));
}

TEST(unexpected_bytes_are_returned_and_nothing_after_them_is_read) {
    const Pair pair;
    std::string head = "$5\r\n", value(5, '.'), unread(16, '.');
    pair.send_text("$-1\r\n");
    const Operation receive{Kind::receive, {over(value)}};
    CHECK(is(converse(pair, {{Kind::expect, {over(head)}}, receive}, unread), 0, 4, 0));
    CHECK(unread.substr(0, 4) == "$-1\r" && value == ".....");
    std::string rest(1, '.');
    CHECK(read(pair.here, rest.data(), 1) == 1 && rest == "\n");
}

TEST(a_mismatch_does_not_wait_for_the_full_length) {
    const Pair pair;
    std::string head = "$33554432\r\n", unread(16, '.');
    pair.send_text("$-1\r\n");
    CHECK(is(converse(pair, {{Kind::expect, {over(head)}}}, unread), 0, 5, 0));
}

TEST(an_expectation_longer_than_the_buffer_fails) {
    const Pair pair;
    std::string head = "12345", unread(4, '.');
    pair.send_text(head);
    CHECK(is(converse(pair, {{Kind::expect, {over(head)}}}, unread), 0, 0, 0));
}

TEST(an_expected_reply_in_pieces) {
    const Pair pair;
    std::string head = "$123\r\n", unread(6, '.');
    std::thread talks([&] {
        for (const char letter : head) pair.send_text(std::string(1, letter));
    });
    CHECK(is(converse(pair, {{Kind::expect, {over(head)}}}, unread), 1, 0, 0));
    talks.join();
}

TEST(the_peer_closes) {
    Pair pair;
    std::string value(5, '.'), unread;
    pair.send_text("abc");
    pair.hang_up();
    CHECK(is(converse(pair, {{Kind::receive, {over(value)}}}, unread), 0, 3, ESHUTDOWN));
    CHECK(value == "abc..");
    const Progress sent = converse(pair, {{Kind::send, {over(value)}}}, unread);
    CHECK(is(sent, 0, 0, EPIPE));
}

TEST(timeouts) {
    const Pair pair;
    std::string value(5, '.'), head = "abcd", unread(4, '.');
    pair.send_text("ab");
    CHECK(is(converse(pair, {{Kind::expect, {over(head)}}}, unread, 20ms), 0, 2, ETIMEDOUT));
    CHECK(is(converse(pair, {{Kind::receive, {over(value)}}}, unread, 20ms), 0, 0, ETIMEDOUT));
    CHECK(is(converse(pair, {{Kind::receive, {over(value)}}}, unread, -1s), 0, 0, ETIMEDOUT));
    std::string much(8 << 20, 'x');
    const Progress sent = converse(pair, {{Kind::send, {over(much)}}}, unread, 20ms);
    CHECK(sent.operations == 0 && sent.bytes > 0 && sent.bytes < much.size() && sent.error == ETIMEDOUT);
}

TEST(a_trickle_does_not_extend_the_deadline) {
    const Pair pair;
    std::string value(1 << 20, '.'), unread;
    const auto until = Clock::now() + 100ms;
    std::thread trickles([&] {
        while (Clock::now() < until) {
            pair.send_text("x");
            std::this_thread::sleep_for(1ms);
        }
    });
    const Progress got = converse(pair, {{Kind::receive, {over(value)}}}, unread, 50ms);
    CHECK(got.operations == 0 && got.error == ETIMEDOUT);
    trickles.join();
}

TEST(shut_down_by_another_thread) {
    const Pair pair;
    std::string value(5, '.'), unread;
    std::thread cuts([&] { shutdown(pair.here, SHUT_RDWR); });
    CHECK(is(converse(pair, {{Kind::receive, {over(value)}}}, unread), 0, 0, ESHUTDOWN));
    cuts.join();
}

// A peer that closes while its window is closed sends nothing more, so a blocked send would wait in vain.
TEST(the_peer_closes_without_reading) {
    Pair pair;
    std::string much(8 << 20, 'x'), unread;
    CHECK(shutdown(pair.there, SHUT_WR) == 0);
    const Progress sent = converse(pair, {{Kind::send, {over(much)}}}, unread);
    CHECK(sent.operations == 0 && sent.bytes > 0 && sent.error == EPIPE);
}

TEST(a_descriptor_that_is_not_a_socket) {
    std::string value(5, '.'), unread;
    const std::vector<Operation> one{{Kind::receive, {over(value)}}};
    CHECK(exchange(-1, one, {}, Clock::now() + timeout).error == EBADF);
    const int file = open("/dev/null", O_RDWR);
    CHECK(exchange(file, one, {}, Clock::now() + timeout).error == ENOTSOCK);
    close(file);
}

TEST(more_spans_than_one_call_accepts) {
    std::mt19937 random(7);
    for (int turn = 0; turn < 30; ++turn) {
        const Pair pair;
        const int size = 4096;
        setsockopt(pair.here, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        std::vector<std::string> out, in;
        Operation send{Kind::send, {}}, receive{Kind::receive, {}};
        const std::size_t count = random() % 2500;
        for (std::size_t index = 0; index < count; ++index) {
            out.push_back(noise(random, random() % 3 == 0 ? 0 : random() % 700));
            in.emplace_back(out.back().size(), '\0');
        }
        for (std::string& text : out) send.spans.push_back(over(text));
        for (std::string& text : in) receive.spans.push_back(over(text));
        std::thread sends([&] {
            std::string none;
            CHECK(is(converse(pair, {send}, none), 1, 0, 0));
        });
        const std::vector<Operation> one{receive};
        CHECK(is(exchange(pair.there, one, {}, Clock::now() + timeout), 1, 0, 0));
        sends.join();
        CHECK(in == out);
    }
}

// Property test: nothing is written outside of the given buffers, and no more bytes are read than requested.
TEST(random_replies_to_random_expectations) {
    std::mt19937 random(11);
    for (int turn = 0; turn < 3000; ++turn) {
        Pair pair;
        std::string script = noise(random, random() % 60), unread(random() % 20, '.');
        std::vector<std::string> texts;
        std::vector<Kind> kinds;
        std::size_t at = 0;
        while (at < script.size() && texts.size() < 9) {
            const std::size_t length = std::min<std::size_t>(random() % 12, script.size() - at);
            kinds.push_back(random() % 2 == 0 ? Kind::expect : Kind::receive);
            texts.push_back(script.substr(at, length));
            if (kinds.back() == Kind::receive) texts.back().assign(length, '.');
            if (length > 0 && random() % 8 == 0) texts.back()[random() % length] ^= 1;
            at += length;
        }
        std::vector<Operation> operations;
        std::size_t wanted = 0;
        for (std::size_t index = 0; index < texts.size(); ++index) {
            operations.push_back({kinds[index], {over(texts[index])}});
            wanted += texts[index].size();
        }
        pair.send_text(script);
        pair.hang_up();
        const Progress got = converse(pair, operations, unread);
        std::size_t taken = got.bytes;
        for (std::size_t index = 0; index < got.operations; ++index) taken += texts[index].size();
        std::string rest(script.size() + 1, '\0');
        const ssize_t left = read(pair.here, rest.data(), rest.size());
        CHECK(left >= 0 && taken + std::size_t(left) == script.size());
        CHECK(got.error == 0 && taken <= wanted);
    }
}

TEST(payloads_are_hashed_on_both_sides) {
    std::mt19937 random(12);
    const Pair pair;
    std::vector<std::string> sent, received;
    for (const std::size_t length : {300'000, 100, 241, 1 << 20, 5000}) {
        sent.push_back(noise(random, length));
        received.emplace_back(length, '.');
    }
    std::vector<Span> from, into;
    kvtier::Hashes sending, receiving;
    for (std::size_t at = 0; at < sent.size(); ++at) {
        from.push_back(over(sent[at]));
        into.push_back(over(received[at]));
        sending.add({from[at].data, from[at].length}, false);
        // The third is moved, too, but is not what is to be hashed.
        receiving.add({into[at].data, at == 2 ? into[at].length + 1 : into[at].length}, false);
    }
    const std::vector<Operation> sends{{Kind::send, from}}, receives{{Kind::receive, into}};
    std::thread sender([&] {
        CHECK(is(exchange(pair.there, sends, {}, Clock::now() + timeout, true, &sending), 1, 0, 0));
    });
    CHECK(is(exchange(pair.here, receives, {}, Clock::now() + timeout, true, &receiving), 1, 0, 0));
    sender.join();
    CHECK(received == sent);
    for (std::size_t at = 0; at < sent.size(); ++at) {
        // Shorter ones are not hashed.
        const bool hashed = sent[at].size() >= kvtier::min_checksummed;
        CHECK(sending.digests()[at].has_value() == hashed);
        CHECK(receiving.digests()[at].has_value() == (hashed && at != 2));
        if (!hashed) continue;
        const kvtier::Digest digest = kvtier::xxh3_128({from[at].data, from[at].length});
        CHECK(sending.digests()[at] == digest);
        if (at != 2) CHECK(receiving.digests()[at] == digest);
    }
}

TEST(what_arrives_with_a_gap_is_not_hashed) {
    std::string text(5000, 'x');
    kvtier::Hashes hashes;
    hashes.add({over(text).data, text.size()}, false);
    hashes.move(over(text).data, 1000);
    hashes.move(over(text).data + 2000, 3000);
    CHECK(!hashes.digests()[0]);
    hashes.move(over(text).data + 1000, 1000);
    CHECK(!hashes.digests()[0]);
    hashes.move(over(text).data + 2000, 3000);
    CHECK(hashes.digests()[0] == kvtier::xxh3_128({over(text).data, text.size()}));
}

TEST(nothing_blocks_without_waits) {
    const Pair pair;
    std::string request = "?", head = "$4\r\n", value(4, '.'), unread(8, '.');
    const std::vector<Operation> all{
        {Kind::send, {over(request)}}, {Kind::expect, {over(head)}}, {Kind::receive, {over(value)}}};
    CHECK(is(exchange(pair.here, all, {over(unread).data, 8}, {}, false), 1, 0, EAGAIN));
    pair.send_text("$4\r\nab");
    const std::span<const Operation> rest = std::span(all).subspan(1);
    CHECK(is(exchange(pair.here, rest, {over(unread).data, 8}, {}, false), 1, 2, EAGAIN));
    CHECK(value == "ab..");
    std::string much(8 << 20, 'x');
    const std::vector<Operation> send{{Kind::send, {over(much)}}};
    const Progress sent = exchange(pair.here, send, {}, {}, false);
    CHECK(sent.operations == 0 && sent.bytes > 0 && sent.error == EAGAIN);
}

namespace {

// Wait until `count` conversations have ended.
std::vector<Ended> wait_for(Pump& pump, std::size_t count) {
    std::vector<Ended> all;
    while (all.size() < count) {
        pollfd one{pump.descriptor(), POLLIN, 0};
        CHECK(poll(&one, 1, 30'000) == 1);
        for (const Ended& end : pump.collect()) all.push_back(end);
    }
    std::sort(all.begin(), all.end(), [](const Ended& a, const Ended& b) { return a.ticket < b.ticket; });
    return all;
}

}  // namespace

TEST(a_pump_runs_more_conversations_than_it_has_threads) {
    constexpr std::size_t count = 40;
    Pump pump(3);
    std::vector<Pair> pairs(count);
    std::vector<std::string> requests(count), heads(count, "+"), values(count, "...."), unread(count, ".");
    for (std::size_t index = 0; index < count; ++index) {
        requests[index] = std::to_string(index);
        pairs[index].send_text("+" + std::to_string(1000 + index));
        pump.start({index,
                    pairs[index].here,
                    {{Kind::send, {over(requests[index])}},
                     {Kind::expect, {over(heads[index])}},
                     {Kind::receive, {over(values[index])}}},
                    {over(unread[index]).data, 1},
                    Clock::now() + timeout});
    }
    const std::vector<Ended> all = wait_for(pump, count);
    for (std::size_t index = 0; index < count; ++index) {
        CHECK(all[index].ticket == index && is(all[index].progress, 3, 0, 0));
        CHECK(values[index] == std::to_string(1000 + index));
    }
    CHECK(pump.collect().empty());
    pollfd one{pump.descriptor(), POLLIN, 0};
    CHECK(poll(&one, 1, 0) == 0);
}

TEST(destroying_a_pump_waits_for_conversations_in_flight) {
    const Pair pair;
    std::string value(4, '.');
    std::thread cuts;
    {
        Pump pump(1);
        pump.start({1, pair.here, {{Kind::receive, {over(value)}}}, {}, Clock::now() + timeout});
        cuts = std::thread([&] { shutdown(pair.here, SHUT_RDWR); });
    }
    value.assign("free");
    cuts.join();
}

TEST(a_conversation_queued_beyond_its_deadline_does_not_start) {
    const Pair busy, late;
    Pump pump(1);
    std::string value(1, '.'), never(1, '.');
    late.send_text("x");
    pump.start({1, busy.here, {{Kind::receive, {over(value)}}}, {}, Clock::now() + timeout});
    pump.start({2, late.here, {{Kind::receive, {over(never)}}}, {}, Clock::now()});
    busy.send_text("x");
    const std::vector<Ended> all = wait_for(pump, 2);
    CHECK(is(all[0].progress, 1, 0, 0) && is(all[1].progress, 0, 0, ETIMEDOUT) && never == ".");
}

TEST(an_unused_pump) {
    const Pump pump(4);
    CHECK(pump.descriptor() >= 0);
}

int main() {
    return kvtier::test::run();
}
