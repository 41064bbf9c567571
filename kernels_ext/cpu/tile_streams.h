// Which bytes of 4-bit tiles will be read next, where several tiles are walked side by side?
//
// Included inside the anonymous namespaces of the 4-bit linears. Streams of T tiles end together, and each goes on with the
// tile T further: T - 1 tiles behind its end. A prefetch straight on would fetch its neighbour, which was just read.
struct TileStreams {
  int64_t tile_bytes, ahead, behind_end;
  TileStreams(int64_t tile_bytes, int tiles, int64_t ahead = 4096)
      : tile_bytes(tile_bytes), ahead(std::min(ahead, tile_bytes)), behind_end((tiles - 1) * tile_bytes) {}
  // From byte `offset` of each tile to those read `ahead` bytes later.
  int64_t distance(int64_t offset) const { return offset + ahead < tile_bytes ? ahead : ahead + behind_end; }
};
