// A thread pool that helps callers with many small pieces of one job.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

namespace kvtier {

// The maximum number of threads for a large job, including the caller: one per CPU that this process may use, but at
// most 8, because memory bandwidth is exhausted then.
unsigned useful_threads();

// The number of threads, including the caller and at least 1, that can run now without sharing a CPU with more than one
// other runnable thread. A helper that is preempted in the middle of a piece delays the caller until it runs again,
// which takes hundreds of milliseconds on a saturated machine. Reads /proc/loadavg, which takes some microseconds;
// returns the number of CPUs if that fails.
unsigned spare_threads();

// The same for the given contents of /proc/loadavg, "0.10 0.20 0.30 RUNNABLE/ALL LAST".
unsigned spare_threads(std::string_view loadavg, unsigned processors);

// Call work(0) … work(count - 1), each once, on the caller and up to threads - 1 helpers; return when all calls have
// returned. `work` must not throw. Helpers start on demand and then sleep between jobs; a forked process starts its
// own. The helpers serve one caller at a time: a caller that finds them busy does all work itself.
void parallel_for(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace kvtier
