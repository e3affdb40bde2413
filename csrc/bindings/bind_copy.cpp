#include "kvtier/checksum.hpp"
#include "pages.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

const std::byte* bytes_of(const ReadOnlyBytes& array) {
    return reinterpret_cast<const std::byte*>(array.data());
}

template <Direction direction>
void copy_pages(const KvMemory& memory, const Bytes& arena, std::vector<ChunkTuple> chunks, unsigned threads) {
    const std::vector<ChunkPages> pages = chunk_pages(chunks);
    const nb::gil_scoped_release released;
    memory.copy(span_of(arena), pages, direction, threads);
}

void copy_pairs(const std::vector<std::pair<Bytes, ReadOnlyBytes>>& pairs, unsigned threads) {
    std::vector<Buffer> buffers;
    for (const auto& [to, from] : pairs) {
        if (to.nbytes() != from.nbytes()) throw nb::value_error("target and source differ in length");
        buffers.push_back({span_of(to).data(), bytes_of(from), to.nbytes()});
    }
    const nb::gil_scoped_release released;
    copy_buffers(buffers, threads);
}

nb::bytes checksum(const ReadOnlyBytes& array) {
    std::array<std::byte, 16> digest;
    {
        const nb::gil_scoped_release released;
        digest = xxh3_128({bytes_of(array), array.nbytes()});
    }
    return nb::bytes(digest.data(), digest.size());
}

}  // namespace

void bind_copy(nb::module_& module) {
    nb::class_<KvMemory>(module, "KvMemory")
        .def(nb::new_(&kv_memory), nb::arg("groups"), nb::arg("skipped"))
        .def("load", &copy_pages<Direction::into_engine>, nb::arg("arena"), nb::arg("chunks"),
             nb::arg("threads") = 0)
        .def("save", &copy_pages<Direction::out_of_engine>, nb::arg("arena"), nb::arg("chunks"),
             nb::arg("threads") = 0);
    module.def("copy_buffers", &copy_pairs, nb::arg("pairs"), nb::arg("threads") = 0);
    module.def("xxh3_128", &checksum, nb::arg("data"));
}

}  // namespace kvtier::bindings
