// Keep signals away from internal threads, so that the program's own threads handle them.
#pragma once

#include <signal.h>

namespace kvtier {

// Blocks all signals in this thread while it lives. Threads started meanwhile inherit that from their first moment.
class WithoutSignals {
public:
    WithoutSignals() {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~WithoutSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    WithoutSignals(const WithoutSignals&) = delete;
    WithoutSignals& operator=(const WithoutSignals&) = delete;

private:
    sigset_t before_{};
};

}  // namespace kvtier
