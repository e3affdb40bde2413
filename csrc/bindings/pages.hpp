// Python representation of pages, shared by the host and the CUDA module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "kvtier/copy.hpp"

namespace kvtier::bindings {

using Bytes = nanobind::ndarray<std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using ReadOnlyBytes = nanobind::ndarray<const std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using RegionTuple = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::size_t>;
using ChunkTuple = std::pair<std::size_t, std::vector<std::vector<std::int64_t>>>;

inline std::span<std::byte> span_of(const Bytes& array) {
    return {reinterpret_cast<std::byte*>(array.data()), array.nbytes()};
}

inline KvMemory kv_memory(const std::vector<std::vector<RegionTuple>>& groups, std::int64_t skipped) {
    std::vector<std::vector<Region>> regions;
    for (const auto& group : groups) {
        auto& converted = regions.emplace_back();
        for (const auto& [base, page_bytes, pages, stride] : group) {
            converted.push_back({reinterpret_cast<std::byte*>(base), page_bytes, pages, stride});
        }
    }
    return {std::move(regions), skipped};
}

inline std::vector<ChunkPages> chunk_pages(std::vector<ChunkTuple>& chunks) {
    std::vector<ChunkPages> result;
    result.reserve(chunks.size());
    for (auto& [offset, blocks] : chunks) result.push_back({offset, std::move(blocks)});
    return result;
}

}  // namespace kvtier::bindings
