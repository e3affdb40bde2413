// What tests in Python call, through ctypes. See stand_in.hpp.

#include <cstring>

#include "stand_in.hpp"

using namespace cuda_stand_in;

namespace {

// Write the lines, as one text, from one on and as far as there is room.
void write_lines(const std::vector<std::string>& lines, char* text, std::size_t room, std::size_t first = 0) {
    std::string joined;
    for (std::size_t at = first; at < lines.size(); ++at) joined += lines[at] + "\n";
    const std::size_t length = std::min(joined.size(), room - 1);
    std::memcpy(text, joined.data(), length);
    text[length] = 0;
}

}  // namespace

extern "C" {

void stand_in_reset(int pace, unsigned seed, int devices) { reset(static_cast<Pace>(pace), seed, devices); }

void stand_in_finish(char* text, std::size_t room) { write_lines(finish(), text, room); }

void stand_in_synchronize() { synchronize(); }

void stand_in_calls(char* text, std::size_t room) { write_lines(calls(), text, room); }

void stand_in_trace(char* text, std::size_t room, std::size_t first) { write_lines(trace(), text, room, first); }

void stand_in_fail(std::size_t call, int error, bool lasting) {
    fail({call, static_cast<cudaError_t>(error), lasting});
}

void stand_in_fail_operation(std::size_t number) { fail_operation(number); }

void stand_in_alive(std::size_t* counts) {
    const Alive now = alive();
    const std::size_t all[] = {now.streams, now.events, now.allocated, now.registered, now.buffers};
    std::memcpy(counts, all, sizeof all);
}

bool stand_in_has_context(int device) { return has_context(device); }

void stand_in_add_device(std::byte* begin, std::size_t length) { add_device({begin, length}); }

void stand_in_free_device(std::byte* begin) { free_device(begin); }

void stand_in_on_host(const std::byte* begin, std::size_t length, bool writes) { on_host({begin, length}, writes); }

void stand_in_fill(cudaStream_t stream, std::byte* begin, std::size_t length, int value) {
    launch(stream, {begin, length}, true, [=] { std::memset(begin, value, length); });
}

// A kernel that writes these bytes, copied now. `alone`: whether an operation that reads them at the same time is wrong.
void stand_in_write(cudaStream_t stream, std::byte* begin, const std::byte* bytes, std::size_t length, bool alone) {
    const std::vector<std::byte> copied(bytes, bytes + length);
    const auto checked = alone ? std::span<const std::byte>(begin, length) : std::span<const std::byte>();
    launch(stream, checked, true, [=] { std::memcpy(begin, copied.data(), copied.size()); });
}

void stand_in_wait_for_stream(cudaStream_t stream) { wait_for_stream(stream); }

}  // extern "C"
