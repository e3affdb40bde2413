#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kvtier/checksum.hpp"
#include "kvtier/copy.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadOnlyBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RegionTuple = std::tuple<std::uintptr_t, std::size_t, std::size_t>;
using ChunkTuple = std::pair<std::size_t, std::vector<std::vector<std::int64_t>>>;

std::byte* bytes_of(const Bytes& array) { return reinterpret_cast<std::byte*>(array.data()); }

const std::byte* bytes_of(const ReadOnlyBytes& array) {
    return reinterpret_cast<const std::byte*>(array.data());
}

kvtier::KvMemory kv_memory(const std::vector<std::vector<RegionTuple>>& groups, std::int64_t skipped) {
    std::vector<std::vector<kvtier::Region>> regions;
    for (const auto& group : groups) {
        auto& made = regions.emplace_back();
        for (const auto& [base, page_bytes, pages] : group) {
            made.push_back({reinterpret_cast<std::byte*>(base), page_bytes, pages});
        }
    }
    return {std::move(regions), skipped};
}

template <kvtier::Direction direction>
void copy_pages(const kvtier::KvMemory& memory, const Bytes& arena, std::vector<ChunkTuple> chunks,
                unsigned threads) {
    std::vector<kvtier::ChunkPages> wanted;
    wanted.reserve(chunks.size());
    for (auto& [offset, blocks] : chunks) wanted.push_back({offset, std::move(blocks)});
    const nb::gil_scoped_release released;
    memory.copy({bytes_of(arena), arena.nbytes()}, wanted, direction, threads);
}

void copy_buffers(const std::vector<std::pair<Bytes, ReadOnlyBytes>>& pairs, unsigned threads) {
    std::vector<kvtier::Buffer> buffers;
    for (const auto& [to, from] : pairs) {
        if (to.nbytes() != from.nbytes()) throw nb::value_error("target and source differ in length");
        buffers.push_back({bytes_of(to), bytes_of(from), to.nbytes()});
    }
    const nb::gil_scoped_release released;
    kvtier::copy_buffers(buffers, threads);
}

nb::bytes xxh3_128(const ReadOnlyBytes& array) {
    std::array<std::byte, 16> digest;
    {
        const nb::gil_scoped_release released;
        digest = kvtier::xxh3_128({bytes_of(array), array.nbytes()});
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
    module.def("copy_buffers", &copy_buffers, nb::arg("pairs"), nb::arg("threads") = 0);
    module.def("xxh3_128", &xxh3_128, nb::arg("data"));
}

}  // namespace kvtier::bindings
