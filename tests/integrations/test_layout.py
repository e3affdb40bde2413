"""Layouts from vLLM's own descriptions of KV caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ResolvedRevision
from vllm.config.multimodal import MultiModalConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.errors import LayoutError
from kvtier.integrations.vllm.compat import lookahead_tokens
from kvtier.integrations.vllm.layout import INPUT_OPTIONS, model_layout, page_views, probe
from kvtier.memory.layout import STATE_TOKENS, GroupLayout, GroupValues

BLOCKS = 10
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=64, **HEADS)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
STATES = MambaSpec(
    block_size=64,
    shapes=((3, 20), (8, 4, 4)),
    dtypes=(torch.float32, torch.float32),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)
STATE_BYTES = 4 * (60 + 128)


def cache_config(*specs: KVCacheSpec, layers: int = 1, alignment: int | None = None) -> KVCacheConfig:
    """Return a cache with a group for each spec, whose tensors share memory as in vLLM."""
    groups, tensors = [], []
    for number, spec in enumerate(specs):
        names = [f"layer.{number}.{layer}" for layer in range(layers)]
        page_bytes = spec.page_size_bytes
        if isinstance(spec, UniformTypeKVCacheSpecs):
            names, page_bytes = list(spec.kv_cache_specs), spec.first_spec.page_size_bytes
        groups.append(KVCacheGroupSpec(names, spec))
        stride = BLOCKS * page_bytes
        tensors.append(KVCacheTensor(len(names) * stride, names, stride, page_bytes))
    config = KVCacheConfig(BLOCKS, tensors, groups, kv_cache_layout="LBHNC")
    config.cache_hit_alignment_tokens = alignment  # No field of it before vLLM 0.32.
    return config


@dataclass
class Engine:
    """What the layout depends on besides the cache."""

    ranks: int = 1
    kv_heads: int = 2
    device: str = "cuda"
    caching: bool = True
    chunked: bool = True
    cacheable: bool = True
    mla: bool = False
    drafts: Any = None
    """vLLM's speculative configuration."""
    lora: Any = None
    """vLLM's configuration of adapters."""
    stages: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    hosts: int = 1
    inputs: MultiModalConfig | None = None

    @property
    def config(self) -> Any:
        model = SimpleNamespace(
            model="m",
            revision=None,
            quantization=None,
            dtype="float32",
            use_mla=self.mla,
            is_prefix_caching_supported=self.cacheable,
            hf_config=SimpleNamespace(to_dict=dict),
            multimodal_config=self.inputs,
            get_total_num_kv_heads=lambda: self.kv_heads,
        )
        return SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.ranks,
                pipeline_parallel_size=self.stages,
                prefill_context_parallel_size=self.pcp,
                decode_context_parallel_size=self.dcp,
                cp_kv_cache_interleave_size=self.interleave,
                nnodes_within_dp=self.hosts,
            ),
            device_config=SimpleNamespace(device_type=self.device),
            cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=self.caching),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=self.chunked),
            model_config=model,
            speculative_config=self.drafts,
            lora_config=self.lora,
        )


def layout_of(
    *specs: KVCacheSpec, engine: Engine | None = None, chunk_tokens: Any = "auto", rank: int = 0, **more: Any
) -> Any:
    return model_layout((engine or Engine()).config, cache_config(*specs, **more), chunk_tokens, rank=rank)


def test_recognised_groups() -> None:
    window = SlidingWindowSpec(block_size=32, sliding_window=100, extra_retained_tokens=3, **HEADS)
    local = ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=96, **HEADS)
    groups = layout_of(FULL, window, local, STATES).layout.groups
    assert [(group.window, group.state) for group in groups] == [
        (0, False),
        (103, False),
        (96, False),
        (0, True),
    ]


def drafts(method: str, model: str | None, *, tokens: int = 3, modules: int = 1) -> Any:
    """Return a speculative configuration. ``model``: the one that drafts, if it has KV of its own."""
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=tokens,
        draft_model_config=SimpleNamespace(model=model, revision=None, quantization=None),
        uses_draft_kv_cache=lambda: model is not None,
        use_eagle=lambda: method in ("eagle", "mtp"),
        use_multi_module_mtp=lambda: modules > 1,
    )


def test_engines_share_chunks_only_if_the_same_model_drafts() -> None:
    """Methods without KV of their own do not matter."""

    def name(drafts: Any) -> bytes:
        return bytes(layout_of(FULL, engine=Engine(drafts=drafts)).namespace)

    assert name(None) == name(drafts("ngram", None)) == name(drafts("medusa", None))
    names = [None, drafts("eagle", "a"), drafts("eagle", "b"), drafts("draft_model", "a")]
    assert len({name(each) for each in names}) == len(names)
    assert name(drafts("eagle", "a")) == name(drafts("eagle", "a", tokens=5))


def test_engines_share_chunks_only_if_adapters_have_the_same_dtype() -> None:
    def name(dtype: str | None) -> bytes:
        lora = None if dtype is None else SimpleNamespace(lora_dtype=dtype)
        return bytes(layout_of(FULL, engine=Engine(lora=lora)).namespace)

    assert name(None) == name("float32") != name("bfloat16")


def test_lookahead_is_what_vllm_declares() -> None:
    """Version 0.30 does not declare it."""
    assert lookahead_tokens(SimpleNamespace(num_prefill_lookahead_tokens=3)) == 3
    by_method = {"ngram": 0, "draft_model": 0, "eagle": 1, "mtp": 1}
    for method, tokens in by_method.items():
        assert lookahead_tokens(SimpleNamespace(speculative_config=drafts(method, "a"))) == tokens
    assert lookahead_tokens(SimpleNamespace(speculative_config=drafts("mtp", "a", modules=3))) == 3
    assert lookahead_tokens(SimpleNamespace(speculative_config=None)) == 0


def test_kv_heads_of_drafts_are_not_deduplicated() -> None:
    """They may be sharded where those of the target are replicated."""
    target, drafting = Engine(2, 1), Engine(2, 1, drafts=drafts("eagle", "a"))
    assert layout_of(FULL, engine=target).layout.shares(256) == (0, 0)
    assert layout_of(FULL, engine=drafting).layout.shares(256) == (0, 1)


@pytest.mark.parametrize(
    "spec",
    [
        SinkFullAttentionSpec(block_size=64, sink_len=4, **HEADS),
        EncoderOnlyAttentionSpec(block_size=64, **HEADS),
        CrossAttentionSpec(block_size=64, **HEADS),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_unknown_group_is_refused_by_name(spec: KVCacheSpec) -> None:
    """Also subclasses of supported ones."""
    name = type(spec).__name__.removesuffix("Spec")
    with pytest.raises(LayoutError, match=rf"layer\.1\.0 use {name}, which kvtier does not support"):
        layout_of(FULL, spec)


def test_every_layer_of_a_uniform_group_is_looked_at() -> None:
    mixed = UniformTypeKVCacheSpecs(
        64, {"a": FULL, "b": SinkFullAttentionSpec(block_size=64, sink_len=4, **HEADS)}
    )
    with pytest.raises(LayoutError, match="SinkFullAttention"):
        layout_of(mixed)


def test_state_without_its_boundaries_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"mamba_cache_mode is none: .*--enable-prefix-caching"):
        layout_of(FULL, replace(STATES, mamba_cache_mode="none"))


def test_states_with_drafts_are_refused() -> None:
    """A state may be that after tokens that are rejected later. Attention alone is supported."""
    drafting = Engine(drafts=drafts("ngram", None))
    layout_of(FULL, engine=drafting)
    with pytest.raises(LayoutError, match="does not support speculative decoding of models with states"):
        layout_of(FULL, STATES, engine=drafting)


def test_groups_that_vllm_rebuilds_are_left_out() -> None:
    config = cache_config(FULL, STATES, FULL)
    config.kv_cache_groups[0].enable_kv_transfer = False
    model = model_layout(Engine().config, config, "auto")
    assert (model.group_ids, model.blocks([[1], [2], [3]])) == ((1, 2), ([2], [3]))
    assert [group.state for group in model.layout.groups] == [True, False]


def test_engine_without_kv_is_refused() -> None:
    """Without groups, with groups that vLLM rebuilds only, or without memory for them."""
    rebuilt, empty = cache_config(FULL), cache_config(FULL, STATES)
    rebuilt.kv_cache_groups[0].enable_kv_transfer = False
    empty.kv_cache_tensors = []
    for config in (KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]), rebuilt, empty):
        with pytest.raises(LayoutError, match="this model has no KV cache to store"):
            model_layout(Engine().config, config, "auto")
    with pytest.raises(LayoutError, match="rank 1 has no KV cache to store"):
        model_layout(Engine(1, stages=2).config, empty, "auto", rank=1)


def test_only_the_bytes_of_states_are_stored() -> None:
    model = layout_of(STATES, FULL)
    states, attention = model.layout.groups
    assert states.page_bytes == (STATE_BYTES,)
    assert attention.page_bytes == (FULL.page_size_bytes,)
    memory = torch.arange(BLOCKS * FULL.page_size_bytes, dtype=torch.int64).to(torch.uint8)
    shaped = memory.view(BLOCKS, FULL.page_size_bytes)
    caches = {"layer.0.0": shaped[:, :STATE_BYTES], "layer.1.0": shaped}
    ((state_pages,), (pages,)) = page_views(model, caches)
    assert state_pages.shape == (BLOCKS, STATE_BYTES)
    assert pages.shape == (BLOCKS, FULL.page_size_bytes)
    start = 3 * FULL.page_size_bytes
    assert torch.equal(state_pages[3], memory[start : start + STATE_BYTES])
    assert torch.equal(pages[3], memory[start : start + FULL.page_size_bytes])


@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [((16,), 256), ((32, 64), 256), ((48,), 240), ((96,), 288), ((640,), 640), ((24, 32), 288)],
)
def test_automatic_size_is_near_256(blocks: tuple[int, ...], tokens: int) -> None:
    specs = [replace(FULL, block_size=block) for block in blocks]
    assert layout_of(*specs).layout.chunk_tokens == tokens


@pytest.mark.parametrize(
    ("block", "alignment", "tokens"), [(128, 128, 128), (96, 96, 96), (640, 640, 640), (16, 16, 64)]
)
def test_automatic_size_with_states_is_that_of_vllm_s_hits(block: int, alignment: int, tokens: int) -> None:
    specs = replace(FULL, block_size=block), replace(STATES, block_size=block)
    assert layout_of(*specs, alignment=alignment).layout.chunk_tokens == tokens


def test_size_that_does_not_fit_names_one_that_does() -> None:
    with pytest.raises(
        LayoutError, match=r"chunk_tokens is 100, not a multiple .*: use `auto`, 128 or another"
    ):
        layout_of(FULL, chunk_tokens=100)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_latent_attention_is_stored_once(ranks: int) -> None:
    """Bytes per token do not grow with the number of ranks."""
    layout = layout_of(MLA, layers=3, engine=Engine(ranks=ranks, kv_heads=1)).layout
    assert layout.payload_bytes(256) // 256 == 3 * 576 * 2
    assert set(layout.shares(256)) == {0}


@pytest.mark.parametrize(("ranks", "held", "shares"), [(1, 2, 1), (2, 1, 2), (4, 1, 2), (8, 1, 2)])
def test_heads_that_ranks_hold_in_common_are_stored_once(ranks: int, held: int, shares: int) -> None:
    """Two KV heads, each 256 bytes per token."""
    spec = FullAttentionSpec(block_size=64, num_kv_heads=held, head_size=32, dtype=torch.float32)
    layout = layout_of(spec, engine=Engine(ranks=ranks, kv_heads=2)).layout
    assert (len(set(layout.shares(256))), layout.payload_bytes(256) // 256) == (shares, 2 * 256)
    assert layout.shares(256) == tuple(rank * shares // ranks for rank in range(ranks))


def test_layers_with_different_heads_are_not_assumed_to_be_replicas() -> None:
    """The configuration states the heads of one kind of layer only."""
    other = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.float32)
    layout = layout_of(replace(FULL, num_kv_heads=1), other, engine=Engine(ranks=4, kv_heads=2)).layout
    assert layout.shares(256) == (0, 1, 2, 3)


def test_states_are_split_beside_shared_latents() -> None:
    layout = layout_of(MLA, STATES, engine=Engine(ranks=4, kv_heads=1)).layout
    assert (layout.shares(256), layout.shares(STATE_TOKENS)) == ((0,) * 4, (0, 1, 2, 3))
    replicated = layout_of(
        MLA, replace(STATES, tp_replicated=True), engine=Engine(ranks=4, kv_heads=1)
    ).layout
    assert replicated.groups[1] == GroupLayout(64, (STATE_BYTES,), 0, True, (0,) * 4)


def test_pipeline_stages_are_parts() -> None:
    """Each stage has its own layers, and chunks of its own: of other bytes, and in another namespace."""
    engine = Engine(ranks=2, stages=2)
    first = layout_of(FULL, layers=3, engine=engine, rank=1)
    second = layout_of(FULL, layers=2, engine=engine, rank=2)
    assert [(model.part, model.parts) for model in (first, second)] == [(0, 2), (1, 2)]
    assert [model.layout.ranks for model in (first, second)] == [2, 2]
    assert first.layout.payload_bytes(256) * 2 == second.layout.payload_bytes(256) * 3
    assert layout_of(FULL, layers=3, engine=engine, rank=0).namespace == first.namespace
    assert layout_of(FULL, layers=3, engine=engine, rank=2).namespace != first.namespace
    assert layout_of(FULL, layers=3, engine=Engine(ranks=2)).namespace != first.namespace


def test_stage_without_layers_of_a_group() -> None:
    config = cache_config(FULL, STATES)
    config.kv_cache_groups[1].layer_names = []
    model = model_layout(Engine(stages=2).config, config, "auto")
    assert model.layout.groups[1].page_bytes == ()
    page_views(model, {"layer.0.0": torch.zeros((BLOCKS, 2, 64, 64), dtype=torch.float32)})


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ({"ranks": 8, "hosts": 2}, [4, 4]),
        ({"ranks": 4, "stages": 2, "hosts": 2}, [4, 4]),
        ({"ranks": 4, "stages": 2, "hosts": 4}, [2, 2, 2, 2]),
        ({"ranks": 2, "stages": 4, "hosts": 2}, [2, 2, 2, 2]),
        ({"ranks": 6, "stages": 2, "hosts": 3}, [2] * 6),
    ],
    ids=["tp8-on-2", "a-stage-each", "half-a-stage-each", "two-stages-each", "uneven"],
)
def test_no_part_is_on_several_hosts_or_stages(shape: dict[str, int], parts: list[int]) -> None:
    engine = Engine(kv_heads=8, **shape)
    ranks = range(engine.ranks * engine.stages)
    models = [layout_of(FULL, engine=engine, rank=rank) for rank in ranks]
    assert [model.layout.ranks for model in models] == [size for size in parts for _ in range(size)]
    places = {(models[rank].part, rank // engine.ranks, rank * engine.hosts // len(ranks)) for rank in ranks}
    assert len(places) == len(parts), "one stage and one host for each part"
    assert len({model.namespace for model in models}) == len(parts)


def test_ranks_that_vllm_cannot_place_are_refused() -> None:
    with pytest.raises(LayoutError, match="6 ranks on 4 hosts: kvtier needs as many on each host"):
        layout_of(FULL, engine=Engine(ranks=6, hosts=4))
    with pytest.raises(LayoutError, match="prefill_context_parallel_size is 2 on 2 hosts"):
        layout_of(MLA, engine=Engine(ranks=2, kv_heads=1, pcp=2, hosts=2))


def divides_tokens(test: Callable[..., None]) -> Callable[..., None]:
    """Expect a refusal of a test's engine if vLLM does not declare how ranks divide the tokens of a block."""
    if hasattr(FULL, "dcp_sharded"):
        return test

    @wraps(test)
    def refused(*arguments: Any, **named: Any) -> None:
        with pytest.raises(LayoutError, match="install vLLM 0"):
            test(*arguments, **named)

    return refused


@divides_tokens
def test_divided_tokens_are_part_of_the_layout() -> None:
    """Decode context parallelism: a block holds the tokens of all ranks that divide it."""
    engine = Engine(ranks=4, kv_heads=1, dcp=4, interleave=16)
    model = layout_of(MLA, layers=2, engine=engine)
    assert model.layout.groups[0].block_tokens == 4 * 64
    assert model.layout.shares(256) == (0, 1, 2, 3)
    assert model.layout.payload_bytes(256) // 256 == 2 * 576 * 2, "as much per token as on one rank"
    other = layout_of(MLA, layers=2, engine=replace(engine, interleave=1))
    assert other.namespace != model.namespace
    assert layout_of(MLA, layers=2, engine=Engine(ranks=4, kv_heads=1)).namespace != model.namespace


@divides_tokens
def test_heads_on_ranks_that_divide_their_tokens() -> None:
    """Two KV heads on eight ranks, of which two each divide the tokens: two ranks hold the same."""
    spec = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=32, dtype=torch.float32)
    layout = layout_of(spec, engine=Engine(ranks=8, kv_heads=2, dcp=2)).layout
    assert layout.shares(256) == (0, 1, 0, 1, 2, 3, 2, 3)
    assert layout.payload_bytes(256) // 256 == 2 * 256


def test_copies_for_prefill() -> None:
    layout = layout_of(MLA, engine=Engine(ranks=2, kv_heads=1, pcp=2)).layout
    assert layout.shares(256) == (0, 0, 0, 0)
    assert layout.payload_bytes(256) // 256 == 576 * 2


@pytest.mark.parametrize(("dcp", "shares"), [(2, (0, 0, 1, 1)), (4, (0, 2, 1, 3))], ids=["2", "4"])
@divides_tokens
def test_prefill_context_parallelism(dcp: int, shares: tuple[int, ...]) -> None:
    """Two by two ranks divide the tokens along the prefill axis first."""
    layout = layout_of(MLA, engine=Engine(ranks=2, kv_heads=1, pcp=2, dcp=dcp)).layout
    assert layout.ranks == 4
    numbers: dict[int, int] = {}
    assert layout.shares(256) == tuple(numbers.setdefault(share, len(numbers)) for share in shares)
    assert layout.payload_bytes(256) // 256 == 576 * 2


def test_other_weights_have_another_namespace() -> None:
    config, cache = Engine().config, cache_config(FULL)
    spaces = {model_layout(config, cache, "auto", weights).namespace for weights in ("", "step-1", "step-2")}
    assert len(spaces) == 3


@pytest.mark.parametrize(
    ("spec", "device", "order", "values"),
    [
        (FULL, "cuda", "LBHNC", GroupValues("float32", 64, 64, 32)),
        (FULL, "cuda", "BLNHC", GroupValues("float32", 64, 128, 32)),
        (FULL, "cpu", "LBHNC", GroupValues("float32")),
        (MLA, "cuda", "LBNHC", GroupValues("bfloat16", 64, 576, 96)),
        (replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), "cuda", "LBHNC", GroupValues()),
        (STATES, "cuda", "LBHNC", GroupValues()),
    ],
)
def test_values_for_codecs_with_loss(spec: Any, device: str, order: str, values: GroupValues) -> None:
    config, cache = Engine(device=device).config, cache_config(FULL, spec)
    cache.kv_cache_layout = order
    strict = model_layout(config, cache, "auto")
    lossy = model_layout(config, cache, "auto", accept_lossy=True)
    assert strict.layout.values == ()
    assert lossy.layout.values[1] == values
    assert lossy.namespace != strict.namespace
    assert lossy.layout.platform == strict.layout.platform


def test_options_that_decide_the_kv_of_images_are_in_the_namespace() -> None:
    """vLLM's hash of an image does not contain them."""

    def name(**options: Any) -> bytes:
        return bytes(layout_of(FULL, engine=Engine(inputs=MultiModalConfig(**options))).namespace)

    crops = [{"mm_processor_kwargs": {"num_crops": count}} for count in (4, 16)]
    frames = [{"media_io_kwargs": {"video": {"num_frames": count}}} for count in (8, 32)]
    options = [{}, *crops, *frames, {"video_pruning_rate": 0.5}, {"mm_encoder_attn_dtype": "fp8"}]
    assert len({name(**each) for each in options}) == len(options)
    assert name(limit_per_prompt={"image": 2}, mm_processor_cache_gb=0) == name()


def test_each_option_of_images_is_known() -> None:
    """A new one may decide the KV of an image: then it belongs into ``INPUT_OPTIONS``."""
    irrelevant = {
        *("allow_missing_mm_embeddings", "enable_mm_embeds", "interleave_mm_strings", "language_model_only"),
        *("limit_per_prompt", "mm_device_do_normalize", "mm_encoder_attn_backend", "mm_encoder_only"),
        *("mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_encoder_tp_mode"),
        *("mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type"),
        *("mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "skip_mm_profiling"),
    }
    assert {field.name for field in fields(MultiModalConfig)} == irrelevant.union(INPUT_OPTIONS)


def test_commit_of_a_hub_names_the_weights() -> None:
    """A branch has other weights after its next commit; a tag of the same commit has the same."""

    def spaces(revision: Any) -> tuple[bytes, bytes]:
        drafter = drafts("eagle", "a")
        drafter.draft_model_config.revision = revision
        own, with_drafter = Engine().config, Engine(drafts=drafter).config
        own.model_config.revision = revision
        layouts = [model_layout(config, cache_config(FULL), "auto") for config in (own, with_drafter)]
        return layouts[0].namespace, layouts[1].namespace

    main, newer = ResolvedRevision("a" * 40), ResolvedRevision("b" * 40)
    assert main == newer == "main"
    assert not {*spaces(main)} & {*spaces(newer)}
    assert spaces(main) == spaces(ResolvedRevision("a" * 40, "v1")) == spaces("a" * 40)


def test_configuration_of_a_model_may_have_any_types() -> None:
    """Remote code may define it, and each process of an engine must derive the same namespace."""

    def space(**shape: Any) -> bytes:
        config = Engine().config
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda: dict(shape))
        return bytes(model_layout(config, cache_config(FULL), "auto").namespace)

    any_types = {"dtype": torch.float32, "size": np.int64(1), 1: {"b", "a"}, "hook": object(), "f": lambda: 0}
    assert space(**{str(key): value for key, value in any_types.items()}) == space(
        **{"dtype": "torch.float32", "size": 1, "1": ["a", "b"], "hook": object(), "f": any_types["f"]}
    )


def test_prefill_over_loaded_tokens_must_be_possible() -> None:
    """MLA on a CPU without AMX: vLLM switches both off, because its kernel cannot do it."""
    off = Engine(device="cpu", caching=False, chunked=False, mla=True)
    with pytest.raises(LayoutError, match=r"cannot continue MLA .* a load would give wrong tokens"):
        layout_of(MLA, engine=off)
    with pytest.raises(LayoutError, match="does not support prefix caching for this model"):
        layout_of(FULL, engine=Engine(caching=False, cacheable=False))
    layout_of(MLA, engine=Engine(device="cpu", mla=True))
    layout_of(FULL, engine=Engine(caching=False))


def memory_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def views_of(
    tensor: torch.Tensor, page_bytes: int, *, stride: int | None = None, offset: int = 0
) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return raw.as_strided((BLOCKS, page_bytes), (stride or page_bytes, 1), offset)


@pytest.mark.parametrize("shape", [(BLOCKS, 2, 64, 8), (2, BLOCKS, 64, 4), (4 * BLOCKS, 2, 16, 8)])
def test_probe_accepts_any_place_of_the_blocks(shape: tuple[int, ...]) -> None:
    """Blocks first, after keys and values, or split into the smaller ones of a kernel."""
    memory = memory_of(*shape)
    size = memory.numel() * 4
    runs = 2 if shape[0] == 2 else 1
    pages = [views_of(memory, size // BLOCKS // runs, offset=run * size // runs) for run in range(runs)]
    memory.fill_(3.0)
    probe(0, [("layer", memory)], pages, BLOCKS)
    assert bool((memory == 3.0).all()), "the block is restored"


@pytest.mark.parametrize(
    ("page_bytes", "stride", "offset", "problem"),
    [
        (2048, 4096, 0, "vLLM reads more from a block"),
        (4096, 4096, 2048, "vLLM reads more from a block"),
        (4096, 2048, 0, "vLLM reads more from a block"),
        (8192, 4096, 0, "kvtier writes to two blocks at once"),
    ],
    ids=["short", "shifted", "stride", "long"],
)
def test_probe_finds_wrong_views(page_bytes: int, stride: int, offset: int, problem: str) -> None:
    memory = memory_of(BLOCKS + 2, 2, 64, 8)
    tensor, pages = memory[:BLOCKS], views_of(memory, page_bytes, stride=stride, offset=offset)
    with pytest.raises(
        LayoutError, match=rf"group 7 \(layer a\) is not laid out as kvtier expects: {problem}"
    ):
        probe(7, [("a", tensor)], [pages], BLOCKS)
    assert not bool(memory.any()), "the block is restored"


def test_probe_refuses_a_tensor_without_blocks() -> None:
    memory = memory_of(7, 64)
    with pytest.raises(LayoutError, match=r"shape \(7, 64\), without 10 blocks"):
        probe(0, [("a", memory)], [views_of(memory_of(BLOCKS, 64), 256)], BLOCKS)


def test_pages_are_probed_when_memory_is_registered() -> None:
    model = layout_of(FULL)
    short = torch.zeros((BLOCKS, 2, 64, 64), dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"layer\.0\.0 has \d+ bytes, expected"):
        page_views(model, {"layer.0.0": short})
    other = torch.zeros((2, BLOCKS, 64, 64), dtype=torch.float32)  # As long as the description says.
    with pytest.raises(LayoutError, match=r"group 0 \(layer layer\.0\.0\) is not laid out"):
        page_views(model, {"layer.0.0": other})
    page_views(model, {"layer.0.0": torch.zeros((BLOCKS, 2, 64, 64), dtype=torch.float32)})
