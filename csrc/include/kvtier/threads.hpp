// Threads that help a caller with many small pieces of one job.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

namespace kvtier {

// How many threads a large job is worth on this machine, the caller among them: one a processor that this
// process may use, at most 8, since memory has no more to give then.
unsigned useful_threads();

// How many threads find a processor at this moment that at most one other wants, the caller among them; at least
// 1. Whatever runs or waits to run on this machine counts: a helper that loses its processor in the middle of a
// piece holds up the caller until it is its turn again, which takes hundreds of milliseconds on a saturated
// machine. Reads /proc/loadavg, some microseconds; without it, as many as there are processors.
unsigned spare_threads();

// The same of the contents of /proc/loadavg, "0.10 0.20 0.30 RUNNABLE/ALL LAST".
unsigned spare_threads(std::string_view loadavg, unsigned processors);

// Call work(0) … work(count - 1), each once, on the caller and up to threads - 1 helpers; returns when all
// have returned. `work` must not throw. Helpers are started when they are first needed and then stay, asleep;
// a process that was forked starts its own. Callers on several threads take turns of the helpers: one that
// finds them busy does its work alone.
void parallel_for(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace kvtier
