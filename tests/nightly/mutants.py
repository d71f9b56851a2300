# ruff: noqa: E501
"""Small mistakes that the suite must find: `python tests/nightly/mutate.py` inserts them, one at a time.

Those of GPU kernels are in test_emulator_mutations.py, for the emulator.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One line of a file, and its replacement, without leading and trailing spaces."""

    path: str
    line: str
    mistake: str

    @property
    def name(self) -> str:
        return f"{self.path}: {self.mistake}"


MUTANTS = [
    Mutant(
        "cuda_ext/bindings/cpu/delta.cpp",
        "const int64_t scratch_size = size.Dk * width + DeltaBackwardWrites<A, 1>::products_size(size.Dk);",
        "const int64_t scratch_size = size.Dk * width - DeltaBackwardWrites<A, 1>::products_size(size.Dk);",
    ),
    Mutant("cuda_ext/bindings/cpu/forget.h", "d_initial.matrix(h, 0, true),", "d_initial.matrix(h, 1, true),"),
    Mutant(
        "cuda_ext/cpu/delta.h",
        "if (m < s) sum[s][m] += load(key[s] + i) * load(key[m] + i);",
        "if (m < s) sum[s][m] = load(key[s] + i) * load(key[m] + i);",
    ),
    Mutant(
        "cuda_ext/cpu/delta.h",
        "for (int64_t j = 0; j < block.rows; ++j) scratch[s * block.rows + j] = rate * e[j];",
        "for (int64_t j = 1; j < block.rows; ++j) scratch[s * block.rows + j] = rate * e[j];",
    ),
    Mutant(
        "cuda_ext/cpu/delta.h",
        "for (int64_t j = 0; j < block.rows; ++j) scratch[s * block.rows + j] = rate * e[j];",
        "for (int64_t j = 0; j < block.rows; ++j) scratch[s * block.rows + j] = e[j] - (1 - rate) * e[j];",
    ),
    # One running sum.
    Mutant("cuda_ext/cpu/state_block.h", "constexpr int64_t kSumRows = 32;", "constexpr int64_t kSumRows = 1 << 20;"),
    Mutant(
        "cuda_ext/cpu/delta_short.h",
        "u.row[r].scale(beta[std::min(t + r, length - 1)]);",
        "u.row[r].scale(beta[std::min(t - r, length - 1)]);",
    ),
    Mutant(
        "cuda_ext/cpu/delta_short.h",
        "if (!subtract && m >= r) sum.row[r].add(factor[t + m][t + r], other);",
        "if (!subtract && m >= r) sum.row[r].add(factor[t + m][t - r], other);",
    ),
    Mutant(
        "cuda_ext/cpu/delta_short.h",
        "if (m <= r) sum.row[r].add(factor[r][t + m], other);",
        "if (m < r) sum.row[r].add(factor[r][t + m], other);",
    ),
    Mutant(
        "cuda_ext/cpu/delta_square.h",
        "store(d_k[t], beta[t] * gradient.multiply(e));",
        "store(d_k[t], beta[t] + gradient.multiply(e));",
    ),
    Mutant(
        "cuda_ext/cpu/forget.h",
        "for (int64_t c = (length + kChunk - 1) / kChunk; c-- > 0;) {",
        "for (int64_t c = (length + kChunk - 1) / kChunk; c-- > 1;) {",
    ),
    Mutant(
        "cuda_ext/cpu/forget.h",
        "FWP_UNROLL for (int n = 0; n < NV; ++n) w.x[n] *= decay[s][i] * fade[s].x[n];",
        "FWP_UNROLL for (int n = 1; n < NV; ++n) w.x[n] *= decay[s][i] * fade[s].x[n];",
    ),
    Mutant(
        "cuda_ext/cpu/forget.h",
        "const int64_t end = std::min(rows, begin + kSumRows);",
        "const int64_t end = std::min(rows, begin - kSumRows);",
    ),
    Mutant("cuda_ext/cpu/forget.h", "d_decay.x[n] += of_value * d_fade;", "d_decay.x[n] += of_value + d_fade;"),
    Mutant(
        "cuda_ext/cpu/forget.h",
        "self.template step_forward<R>(j, first + t, w, states + t * R * kWidth, sums + t * kSums);",
        "self.template step_forward<R>(j, first + t, w, states + t + R * kWidth, sums + t * kSums);",
    ),
    Mutant(
        "cuda_ext/cpu/forget.h",
        "for_token_groups<kGroup>(last + 1 - first, *this);",
        "for_token_groups<kGroup>(last + 1 + first, *this);",
    ),
    Mutant(
        "cuda_ext/cpu/forget.h",
        "before.load_from(states + r * kWidth, kWidth);",
        "before.load_from(states - r * kWidth, kWidth);",
    ),
    Mutant(
        "cuda_ext/cpu/forget_chunk.h",
        "if (m <= decltype(earlier)::value) faded[m].store_to(faded_at(t) + m * width, width);",
        "if (m < decltype(earlier)::value) faded[m].store_to(faded_at(t) + m * width, width);",
    ),
    Mutant(
        "cuda_ext/cpu/forget_chunk.h",
        "for (int64_t s = 0; s < t; s += kTileRows) scale_rows(w.last, s, t);",
        "for (int64_t s = 0; s < t; s += kTileRows) scale_rows(w.last, s, s);",
    ),
    Mutant(
        "cuda_ext/cpu/forget_chunk.h",
        "of_found.scale(kRemoves ? A(-1) : -rate_at(in, first, t + r));",
        "of_found.scale(kRemoves ? A(1) : -rate_at(in, first, t + r));",
    ),
    Mutant(
        "cuda_ext/cpu/forget_chunk.h",
        "if ((t + count_) % kChunk) continue;",
        "if ((t + kChunkTokens) % (2 * kChunk)) continue;",
    ),
    Mutant(
        "cuda_ext/cpu/forget_chunk.h",
        "for (int m = 0; m < kWriters; ++m) read.total[0].add(with_query[m][0], value[m]);",
        "for (int m = 0; m < kWriters; ++m) read.total[0].add(with_query[0][0], value[m]);",
    ),
    Mutant(
        "cuda_ext/cpu/forget_chunk.h",
        "for (int64_t t = count_; t < rows_; ++t) fill(own_value_fade_[t], values_, 1);",
        "for (int64_t t = count_; t < rows_; ++t) fill(own_value_fade_[t], values_, 0);",
    ),
    Mutant(
        "fairseq_fwp/cli/eval_lm.py",
        'window = args.tokens_per_sample or min(getattr(task, "tokens_per_sample", None) or limit, limit)',
        'window = args.tokens_per_sample or max(getattr(task, "tokens_per_sample", None) or limit, limit)',
    ),
    Mutant(
        "fairseq_fwp/cli/eval_lm.py",
        'if args.dynamic == "sgd" and given[-1] in ("epsilon", "statistics"):',
        'if args.dynamic == "sgd" and given[-2] in ("epsilon", "statistics"):',
    ),
    Mutant(
        "fairseq_fwp/cli/eval_lm.py",
        "counted = tokens if words and all(len(word) == 1 for word in words) else None",
        "counted = tokens if words and all(len(word) == 2 for word in words) else None",
    ),
    Mutant("fairseq_fwp/cli/eval_lm.py", "if of.bits_per_character is not None:", "if of.bits_per_character is None:"),
    Mutant(
        "fairseq_fwp/cli/eval_lm.py",
        'first = dictionary.bos() if getattr(cfg.task, "add_bos_token", False) else dictionary.eos()',
        'first = dictionary.bos() if getattr(cfg.task, "add_bos_token", True) else dictionary.eos()',
    ),
    Mutant(
        "fairseq_fwp/convert/fairseq.py",
        r"""r"(decoder\.layers\.\d+)\.layer_norms\.0\.": r"\1.self_attn_layer_norm.",""",
        r"""r"(decoder\.layers\.\d+)\.layer_norms\.1\.": r"\1.self_attn_layer_norm.",""",
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/initialization.py",
        "length = min(decoder.sample_length, len(tokens) // STREAMS)",
        "length = max(decoder.sample_length, len(tokens) // STREAMS)",
    ),
    Mutant(
        "fairseq_fwp/convert/fairseq.py",
        'flags = {name: value for name, value in settings.items() if value != known[name] and not name.startswith("_")}',
        'flags = {name: value for name, value in settings.items() if value != known[name] and name.startswith("_")}',
    ),
    Mutant(
        "fairseq_fwp/convert/gpt2.py",
        "if eos is not None and not (isinstance(eos, int) and 0 <= eos < words):",
        "if eos is not None and not (isinstance(eos, int) and 1 <= eos < words):",
    ),
    Mutant(
        "fairseq_fwp/convert/linearize.py",
        "if size not in (None, found):",
        "if size in (None, found):",
    ),
    Mutant(
        "fairseq_fwp/convert/linearize.py",
        'if given["decoder_update_rule"] == SOFTMAX:',
        'if given["decoder_update_rule"] != SOFTMAX:',
    ),
    Mutant(
        "fairseq_fwp/convert/transformer_xl.py",
        "if frequencies.shape != ours.shape or ((frequencies.double() - ours).abs() > 1e-3 * ours + 1e-6).any():",
        "if frequencies.shape != ours.shape and ((frequencies.double() - ours).abs() > 1e-3 * ours + 1e-6).any():",
    ),
    Mutant(
        "fairseq_fwp/convert/transformer_xl.py",
        "cutoffs = list(accumulate(sizes_of(tensors, TABLES)[:-1]))",
        "cutoffs = list(accumulate(sizes_of(tensors, TABLES)[:-2]))",
    ),
    Mutant(
        "fairseq_fwp/convert/transformer_xl.py",
        "tables = torch.cat([vectors, biases.unsqueeze(-1)], dim=-1)[:, -count:].flip(1).transpose(1, 2)",
        "tables = torch.cat([vectors, biases.unsqueeze(-1)], dim=-1)[:, -count:].flip(0).transpose(1, 2)",
    ),
    Mutant(
        "fairseq_fwp/synthetic/model.py",
        "losses = squared_errors(retrieved, target.clamp(min=0)).masked_fill(target < 0, 0)",
        "losses = squared_errors(retrieved, target.clamp(min=0)).masked_fill(target <= 0, 0)",
    ),
    Mutant(
        "fairseq_fwp/evaluation/dynamic.py",
        "mean = sum(float(part.sum()) for part in rms) / sum(part.numel() for part in rms)",
        "mean = sum(float(part.sum()) for part in rms) * sum(part.numel() for part in rms)",
    ),
    Mutant(
        "fairseq_fwp/evaluation/dynamic.py",
        'if self.kind == "rms-sum":  # a mean hardly depends on the number',
        'if self.kind != "rms-sum":  # a mean hardly depends on the number',
    ),
    Mutant(
        "fairseq_fwp/evaluation/dynamic.py",
        "back = decay * (trained - weight) if self.rule.decay else 0.0",
        "back = decay * (trained - weight) if self.rule.decay else 1.0",
    ),
    Mutant(
        "fairseq_fwp/evaluation/dynamic.py",
        "squares, count = [torch.zeros_like(weight) for weight in weights], 0",
        "squares, count = [torch.zeros_like(weight) for weight in weights], 1",
    ),
    Mutant(
        "fairseq_fwp/evaluation/protocol.py",
        'found = score(dynamic or scorer, bar, text.tokens, word, getattr(bar, "log", lambda numbers: None))',
        'found = score(dynamic and scorer, bar, text.tokens, word, getattr(bar, "log", lambda numbers: None))',
    ),
    Mutant("fairseq_fwp/evaluation/scoring.py", "total = 0.0", "total = 1.0"),
    Mutant(
        "fairseq_fwp/evaluation/scoring.py",
        "if not self.read == window.start == window.first:",
        "if self.read == window.start == window.first:",
    ),
    Mutant(
        "fairseq_fwp/evaluation/windows.py",
        "window = Window(window.end - context, window.end, min(window.end + step, length))",
        "window = Window(window.end + context, window.end, min(window.end + step, length))",
    ),
    Mutant("fairseq_fwp/evaluation/windows.py", "step = size - context", "step = size + context"),
    Mutant(
        "fairseq_fwp/models/decoder.py",
        "return DecoderState(reorder(self.layers, new_order), reorder(self.positions, new_order))",
        "return DecoderState(reorder(self.layers, new_order), self.positions)",
    ),
    Mutant(
        "fairseq_fwp/models/decoder.py",
        "return self._read(tokens, state, decoding=True)",
        "return self._read(tokens, state, decoding=False)",
    ),
    Mutant(
        "fairseq_fwp/models/decoder.py",
        "counts = seen.unsqueeze(1) + (~padding).long().cumsum(1)",
        "counts = seen.unsqueeze(1) - (~padding).long().cumsum(1)",
    ),
    Mutant(
        "fairseq_fwp/models/fwp_lm.py",
        "return SinusoidalPositions(cfg.decoder_embed_dim, offset=self.padding_idx + 1)",
        "return SinusoidalPositions(cfg.decoder_embed_dim, offset=self.padding_idx - 1)",
    ),
    Mutant(
        "fairseq_fwp/models/fwp_transformer.py",
        'return {name: [memory] if name == "encoder_out" else [] for name in out}',
        'return {name: [memory] if name != "encoder_out" else [] for name in out}',
    ),
    Mutant(
        "fairseq_fwp/models/fwp_xl_lm.py",
        "positions = SinusoidalDistances(*sizes, cfg.clamp_len if cfg.clamp_len > 0 else None, cfg.dropout)",
        "positions = SinusoidalDistances(*sizes, cfg.clamp_len if cfg.clamp_len > 1 else None, cfg.dropout)",
    ),
    Mutant(
        "fairseq_fwp/models/fwp_xl_lm.py",
        'if cfg.decoder_positions == "relative":',
        'if cfg.decoder_positions != "relative":',
    ),
    Mutant(
        "fairseq_fwp/models/fwp_xl_lm.py",
        "if not (self.training and self.decoder.half_loss):",
        "if not (self.training or self.decoder.half_loss):",
    ),
    Mutant(
        "fairseq_fwp/models/fwp_xl_lm.py",
        "if begin and begin % self.sample_length == 0:",
        "if begin and begin % self.sample_length != 0:",
    ),
    Mutant(
        "fairseq_fwp/models/presets.py",
        'DELTA = {"decoder_update_rule": "delta", "sum_normalization": True}',
        'DELTA = {"decoder_update_rule": "delta", "sum_normalization": False}',
    ),
    Mutant(
        "fairseq_fwp/models/language_model.py",
        "if found and not saved.overridden:",
        "if found or not saved.overridden:",
    ),
    Mutant(
        "fairseq_fwp/models/translation_layers.py",
        "nn.init.xavier_uniform_(weight, gain * head_dim**-0.25 / feature_map.scale)",
        "nn.init.xavier_uniform_(weight, gain * head_dim**-0.25 * feature_map.scale)",
    ),
    Mutant(
        "fairseq_fwp/modules/adaptive_softmax.py",
        "tail = F.log_softmax(self._words(index + 1, flat[rows]), dim=-1)",
        "tail = F.log_softmax(self._words(index + 2, flat[rows]), dim=-1)",
    ),
    Mutant(
        "fairseq_fwp/modules/adaptive_softmax.py",
        'log_prob[rows] -= F.cross_entropy(logits[index + 1], targets[index + 1], reduction="none")',
        'log_prob[rows] += F.cross_entropy(logits[index + 1], targets[index + 1], reduction="none")',
    ),
    Mutant("fairseq_fwp/synthetic/memory.py", "return strength.unsqueeze(-1) * ", "return strength.unsqueeze(-1) + "),
    Mutant(
        "fairseq_fwp/modules/attention/base.py",
        "self._queries = (self._columns[:, past:] - past).clamp(min=0)",
        "self._queries = (self._columns[:, past:] + past).clamp(min=0)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/base.py",
        "return part.masked_fill(rows.view(-1, *[1] * (part.dim() - 1)), 0)",
        "return part.masked_fill(rows.view(-1, *[1] * (part.dim() - 1)), 1)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/delta_rnn.py",
        "return self.feedforward.state_size(length) + self.num_heads * head_dim * (head_dim + 1)",
        "return self.feedforward.state_size(length) + self.num_heads * head_dim * (head_dim - 1)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/fast_weight.py",
        "if self.read_out_norm is not None:",
        "if self.read_out_norm is None:",
    ),
    Mutant("fairseq_fwp/modules/attention/fast_weight.py", "if not keep_state:", "if keep_state:"),
    Mutant(
        "fairseq_fwp/modules/attention/fast_weight.py",
        "if self.overflows and v.dtype == torch.float16:",
        "if self.overflows and v.dtype == torch.bfloat16:",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/softmax.py",
        "visible = (band & ~padding.unsqueeze(2)) | (distance == 0)",
        "visible = (band & ~padding.unsqueeze(2)) | (distance == 1)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/softmax.py",
        "padding = F.pad(padding, (before, fill), value=True).unfold(1, self.window - 1 + block, block)  # (B, n, ...)",
        "padding = F.pad(padding, (before, fill), value=True).unfold(1, self.window - 1 - block, block)  # (B, n, ...)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "if rule.normalizer and not self.read_out_only:",
        "if rule.normalizer and self.read_out_only:",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "before = sums[-1][:, :, -1:].masked_fill(empty, 0)",
        "before = sums[-1][:, :, -1:].masked_fill(empty, 1)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "if rule.retrieves and not self.read_out_only:",
        "if rule.retrieves or not self.read_out_only:",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "return features / self.bound(features.sum(-1, keepdim=True))",
        "return features * self.bound(features.sum(-1, keepdim=True))",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "c = (before_each(z, first) * k).sum(-1)",
        "c = (before_each(z, first) * k).sum(-2)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "return self.bound(divisor.squeeze(-1)), k, v, z.squeeze(-1)",
        "return self.bound(divisor.squeeze(-2)), k, v, z.squeeze(-1)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py", "read_out_only: bool = False", "read_out_only: bool = True"
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "return past if first is None else past.masked_fill(first[:, None, :, None], 0)",
        "return past if first is None else past.masked_fill(first[:, None, :, None], 1)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/normalization.py",
        "return self.bound((z[:, :, 1:] * q).sum(-1))",
        "return self.bound((z[:, :, 2:] * q).sum(-1))",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/fast_weight.py",
        "{gate.name: torch.zeros(gate_sizes[gate.name]) for gate in rule.gates if gate.bias or bias}",
        "{gate.name: torch.zeros(gate_sizes[gate.name]) for gate in rule.gates if gate.bias and bias}",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/fast_weight.py",
        "return 2 * opened if gate.doubles and self.negative_eigenvalues else opened",
        "return 2 * opened if gate.doubles or self.negative_eigenvalues else opened",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/relative.py",
        "return projected.unflatten(-1, (-1, self.num_heads, head_dim)).permute(2, 0, 3, 1, 4)",
        "return projected.unflatten(-1, (-1, self.num_heads, head_dim)).permute(2, 1, 3, 1, 4)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/relative.py", "visible &= distance < window", "visible &= distance <= window"
    ),
    Mutant(
        "fairseq_fwp/modules/attention/relative.py",
        "return q + self.content_bias.unsqueeze(1).to(q.dtype), q + self.position_bias.unsqueeze(1).to(q.dtype)",
        "return q - self.content_bias.unsqueeze(1).to(q.dtype), q + self.position_bias.unsqueeze(1).to(q.dtype)",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/softmax.py",
        "is_causal=mask is None and past == 0,",
        "is_causal=mask is None or past == 0,",
    ),
    Mutant(
        "fairseq_fwp/modules/attention/softmax.py",
        "if padding is None and (past == 0 or length == 1):",
        "if padding is None and (past == 0 or length == 2):",
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/layer.py",
        "loss = -softmax.target_log_prob(y, targets).where(known, 0).sum() / self.divisor",
        "loss = softmax.target_log_prob(y, targets).where(known, 0).sum() / self.divisor",
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/layer.py",
        "places = torch.arange(1, x.shape[1] + 1, device=x.device).masked_fill(padding, 0)",
        "places = torch.arange(1, x.shape[1] - 1, device=x.device).masked_fill(padding, 0)",
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/layer.py",
        "new = slots.shape[1] - x.shape[1]",
        "new = slots.shape[1] + x.shape[1]",
    ),
    Mutant("fairseq_fwp/fast_weight_layer/layer.py", "random_start: bool = False,", "random_start: bool = True,"),
    Mutant(
        "fairseq_fwp/fast_weight_layer/layer.py",
        "first = 0 if state is not None else 1",
        "first = 0 if state is None else 1",
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/layer.py",
        'of_vectors = {"norm.weight": normal * of_y, "norm.bias": of_y, "softmax.bias": of_bias}',
        'of_vectors = {"norm.weight": normal + of_y, "norm.bias": of_y, "softmax.bias": of_bias}',
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/initialization.py",
        "layer.first.weight[units] = sign * HEIGHT * torch.linalg.solve(keys, scaled).mT",
        "layer.first.weight[units] = sign * HEIGHT * torch.linalg.solve(keys, scaled)",
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/initialization.py",
        "layer.first.bias[units] = HEIGHT * (1 + sign * (mean @ scaled))",
        "layer.first.bias[units] = HEIGHT * (1 - sign * (mean @ scaled))",
    ),
    Mutant(
        "fairseq_fwp/fast_weight_layer/update.py",
        'FAST_WEIGHTS = {"both": FIRST + SECOND, "first": FIRST, "second": SECOND, "softmax-bias": SOFTMAX, "none": ()}',
        'FAST_WEIGHTS = {"both": FIRST - SECOND, "first": FIRST, "second": SECOND, "softmax-bias": SOFTMAX, "none": ()}',
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "self.feature_dim = 2 * head_dim * nu",
        "self.feature_dim = 2 * head_dim + nu",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "return torch.cat([x * x.roll(shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)",
        "return torch.cat([x * x.roll(shift, dims=-1) for shift in range(1, self.nu - 1)], dim=-1)",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "return grad * ctx.saved_tensors[0].clamp(max=1)",
        "return grad + ctx.saved_tensors[0].clamp(max=1)",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "lengths = torch.randn(rows, columns, **options).norm(dim=-1, keepdim=True)",
        "lengths = torch.randn(rows, columns, **options).norm(dim=-1, keepdim=False)",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "return _orthogonal_blocks(num_features, head_dim, generator, haar=True)",
        "return _orthogonal_blocks(num_features, head_dim, generator, haar=False)",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "num_features = (head_dim + 1) // 2 if features is None else features",
        "num_features = (head_dim + 2) // 2 if features is None else features",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "with torch.autocast(x.device.type, enabled=False):\n            vectors",
        "with torch.autocast(x.device.type, enabled=True):\n            vectors",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "self.scale = head_dim**-0.25 if softmax_scale else 1.0",
        "self.scale = head_dim**-1.25 if softmax_scale else 1.0",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "gaussian = torch.randn(columns, min(columns, rows - start), **options)",
        "gaussian = torch.randn(columns, max(columns, rows - start), **options)",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "return torch.cat(blocks) * lengths",
        "return torch.cat(blocks) + lengths",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "if self.redraw and int(self.draws - 1) % self.redraw == 0:",
        "if self.redraw and int(self.draws - 1) % self.redraw != 0:",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "log_scale = (x.square().sum(-1, keepdim=True) * self.scale**2 + math.log(self.feature_dim)) / 2",
        "log_scale = (x.square().sum(-1, keepdim=True) * self.scale**2 - math.log(self.feature_dim)) / 2",
    ),
    Mutant("fairseq_fwp/modules/feature_maps.py", "self.draws = self.draws + 1", "self.draws = self.draws - 1"),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        "return features + self.offset * self.feature_dim**-0.5 if self.offset else features",
        "return features - self.offset * self.feature_dim**-0.5 if self.offset else features",
    ),
    Mutant(
        "fairseq_fwp/modules/feature_maps.py",
        '(float64 stays).\n    Its features have either sign, so no normalisation by a sum applies to it.\n    """\n\n    positive = False',
        '(float64 stays).\n    Its features have either sign, so no normalisation by a sum applies to it.\n    """\n\n    positive = True',
    ),
    Mutant(
        "fairseq_fwp/modules/update_rules.py",
        "return torch.exp(F.logsigmoid(x) / 16)",
        "return torch.exp(F.logsigmoid(x) * 16)",
    ),
    Mutant(
        "fairseq_fwp/ops/rules.py",
        "return outer(key_decay, value_decay) * memory + outer(k, v)",
        "return outer(key_decay, value_decay) + memory + outer(k, v)",
    ),
    Mutant(
        "fairseq_fwp/ops/fast_weights.py",
        "write = v - retrieve(k, faded) if erases else v",
        "write = v + retrieve(k, faded) if erases else v",
    ),
    Mutant(
        "fairseq_fwp/ops/fast_weights.py",
        "if given.value_decay is not None and (given.rate is not None or given.erases or removes):",
        "if given.value_decay is None and (given.rate is not None or given.erases or removes):",
    ),
    Mutant(
        "fairseq_fwp/ops/rules.py",
        "filled = memory.detach().abs().sum((-2, -1), keepdim=True) != 0",
        "filled = memory.detach().abs().sum((-2, -1), keepdim=False) != 0",
    ),
    Mutant(
        "fairseq_fwp/ops/rules.py",
        "return written / torch.where(writes & filled & (square > 1), square, 1.0).sqrt()",
        "return written * torch.where(writes & filled & (square > 1), square, 1.0).sqrt()",
    ),
    Mutant(
        "fairseq_fwp/ops/rules.py",
        "return decay.unsqueeze(-1) * memory + outer(k, v)",
        "return decay.unsqueeze(-1) + memory + outer(k, v)",
    ),
    Mutant(
        "fairseq_fwp/ops/rule.py",
        "if not shapes or not all(isinstance(shape, tuple) and {*shape} <= SIZES for shape in shapes):",
        "if not shapes or not any(isinstance(shape, tuple) and {*shape} <= SIZES for shape in shapes):",
    ),
    Mutant(
        "fairseq_fwp/ops/rule.py",
        "if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):",
        "if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is None for x in arguments):",
    ),
    Mutant(
        "fairseq_fwp/kernels/self_check.py",
        "if not distance <= LIMITS[dtype]:",
        "if distance > LIMITS[dtype]:",
    ),
    Mutant(
        "fairseq_fwp/kernels/self_check.py",
        'if found["library"] == _digest(library):',
        'if found["library"]:',
    ),
    Mutant(
        "fairseq_fwp/kernels/self_check.py",
        "return _faults.setdefault(device, known[name])",
        "return known[name] if known[name] else {}",
    ),
    Mutant(
        "fairseq_fwp/patches/samples.py",
        "while block > 0 and len(context) < self.context_window:",
        "while block > 1 and len(context) < self.context_window:",
    ),
    Mutant("fairseq_fwp/patches/samples.py", "self.persistent_workers = False", "self.persistent_workers = True"),
    Mutant(
        "fairseq_fwp/patches/data.py",
        "case ast.Dict() if None not in node.keys:",
        "case ast.Dict() if None in node.keys:",
    ),
    Mutant("fairseq_fwp/patches/checkpoints.py", "if not different:", "if different:"),
    Mutant(
        "fairseq_fwp/patches/samples.py",
        "forbidden += [self.eos] * (step < self.min_len)",
        "forbidden += [self.eos] * (step <= self.min_len)",
    ),
    Mutant(
        "fairseq_fwp/patches/samples.py",
        "if limited and len(lengths.unique()) > 1:",
        "if limited and len(lengths.unique()) > 99:",
    ),
    Mutant("fairseq_fwp/patches/training.py", "0 < (limit or 0) <= reached", "0 < (limit or 0) < reached"),
    Mutant(
        "fairseq_fwp/patches/training.py",
        "if name in self.skip_keys or not mean.is_floating_point() or self.decay == 0:",
        "if name in self.skip_keys or not mean.is_floating_point() or self.decay != 0:",
    ),
    Mutant("fairseq_fwp/patches/training.py", "if place in averaged:", "if not place:"),
    Mutant(
        "fairseq_fwp/patches/training.py",
        "share = epsilon / (possible.sum(-1) - 1).clamp(min=1).view_as(nll_loss)",
        "share = epsilon / possible.sum(-1).clamp(min=1).view_as(nll_loss)",
    ),
    Mutant(
        "fairseq_fwp/synthetic/tasks.py",
        "if update <= progress.evaluated_update or update % self.cfg.updates_per_epoch:",
        "if update <= progress.evaluated_update and update % self.cfg.updates_per_epoch:",
    ),
    Mutant(
        "fairseq_fwp/synthetic/tasks.py",
        "waited = self.progress.evaluated_update - self.progress.best_update",
        "waited = self.progress.evaluated_update + self.progress.best_update",
    ),
    Mutant(
        "fairseq_fwp/tasks/fwp_language_modeling.py",
        "if self.args.carry_state and segments == 1:",
        "if self.args.carry_state and segments == 2:",
    ),
    Mutant(
        "fairseq_fwp/tasks/fwp_language_modeling.py",
        'skip_remainder_batch=options.get("skip_remainder_batch", False),',
        'skip_remainder_batch=options.get("skip_remainder_batch", True),',
    ),
    Mutant(
        "fairseq_fwp/synthetic/data.py",
        "pairs = min(pairs, 2 ** (1 + (self.epoch - 1) // self.doubling))",
        "pairs = min(pairs, 2 ** (1 + (self.epoch + 1) // self.doubling))",
    ),
    Mutant(
        "fairseq_fwp/synthetic/data.py",
        "return Setting(max(2 * pairs + 1, length * pairs // self.setting.pairs), pairs, symbols)",
        "return Setting(max(2 * pairs + 2, length * pairs // self.setting.pairs), pairs, symbols)",
    ),
    Mutant(
        "fairseq_fwp/tasks/streams.py",
        "fresh = self.blocks.starts_document[ids] | (segment == 0)",
        "fresh = self.blocks.starts_document[ids] | (segment != 0)",
    ),
    Mutant("fairseq_fwp/tasks/text.py", "if start == 0:", "if start == 1:"),
    Mutant(
        "fairseq_fwp/tasks/text.py",
        "first[self.documents[begin:end] - start] = True",
        "first[self.documents[begin:end] - start] = False",
    ),
    Mutant(
        "fairseq_fwp/tasks/text.py",
        "tokens = self.text.tokens(max(start - 1, 0), stop)",
        "tokens = self.text.tokens(max(start - 2, 0), stop)",
    ),
]
