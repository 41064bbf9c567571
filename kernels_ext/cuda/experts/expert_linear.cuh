// Which kernel multiplies rows of experts? On Hopper warps of their own where an expert has a few (expert_few.cuh), else blocks
// (expert_block.cuh): in one order of sums.
#pragma once

#include "expert_few.cuh"

namespace mlspec::portable {

// Of a token alone two warps a group, which leave blocks enough for all multiprocessors; else four, which share their tokens.
template <class Format>
using OneRow = FewVariant<Format, 2, 1>;
template <class Format>
using EightRows = FewVariant<Format, 4, 8>;
constexpr int kOneRowStages = 8, kEightRowsStages = 3;

// Whether the tokens of an item leave a multiprocessor room for several blocks.
template <class Format>
bool has_few_rows(const mlspec_cuda_expert_linear& args) {
  constexpr int kMost = 96 * 1024;
  const int chunks = int((args.linear.in_features + Format::kChunk - 1) / Format::kChunk);
  return args.most_rows == 1 || EightRows<Format>::shared_bytes(kEightRowsStages, chunks) <= kMost;
}

template <class Format>
const char* launch_few_rows(const mlspec_cuda_expert_linear& args) {
  if (args.most_rows == 1) return launch_few<OneRow<Format>>(args, kOneRowStages);
  return launch_few<EightRows<Format>>(args, kEightRowsStages);
}

template <class Format>
const char* launch_rows_of_experts(const mlspec_cuda_expert_linear& args) {
  const mlspec_cuda_linear& a = args.linear;
  if (a.num_tokens < 1 || a.out_features < 1 || a.in_features < 1 || args.num_pairs < 1 || args.num_pairs % a.num_tokens)
    return "experts take a token or more, inputs, outputs, and as many pairs of every token";
  if (args.activation >= 0 && (a.out_features % kTileOutputs || args.limit > 0))
    return "gate before up are multiples of 32 outputs each, and in turns they are not";
  if (args.limit > 0 && a.out_features % 2) return "gate and up come in turns: outputs are even in number";
  if (args.num_pairs > INT32_MAX / 4) return "too many tokens for one launch: call it for fewer tokens";
  if (Format::kPacked && a.in_features % 32) return "in_features must be a multiple of 32: pad x and the weight";
  switch (mlspec_cuda_rows_of_item(args.num_pairs, args.num_experts)) {
    case 8: {
      if constexpr (kFewByWarps<Format>)
        if (args.copy_engine && has_few_rows<Format>(args)) return launch_few_rows<Format>(args);
      const int64_t tiles = (a.out_features + kTileOutputs - 1) / kTileOutputs;
      if (tiles * mlspec_cuda_most_items(args.num_pairs, args.num_experts) <= kFewBlocks)
        return launch_experts<Variant<Format, 1, kPairBytes, kDeepStages>>(args);
      return launch_experts<Variant<Format, 1, kPairBytes, kManyStages>>(args);
    }
    case 16: return launch_experts<Variant<Format, 2, kPairBytes>>(args);
    default: return launch_experts<Variant<Format, kMostTokenTiles<Format>, kPairBytes>>(args);
  }
}

}  // namespace mlspec::portable
