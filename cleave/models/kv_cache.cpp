#include "cleave/models/kv_cache.h"

#include <algorithm>

namespace cleave {

namespace {

mx::array first_positions(const mx::array& a, int count) {
  auto stop = a.shape();
  stop[2] = count;
  return mx::slice(a, {0, 0, 0, 0}, stop);
}

/// A buffer of `capacity` positions that starts with the first `length` of `old`.
mx::array enlarged(const std::optional<mx::array>& old, const mx::array& like, int length, int capacity) {
  auto shape = like.shape();
  shape[2] = capacity - length;
  auto room = mx::zeros(shape, like.dtype());
  return old && length > 0 ? mx::concatenate({first_positions(*old, length), room}, 2) : room;
}

/// Gives up `buffer`, so that mlx finds it unshared and writes into it.
mx::array written(std::optional<mx::array>& buffer, const mx::array& update, int begin) {
  auto stop = buffer->shape();
  stop[2] = begin + update.shape(2);
  auto result = mx::slice_update(*buffer, update, {0, 0, begin, 0}, stop);
  buffer = std::nullopt;
  return result;
}

} // namespace

int rounded_capacity(int positions) {
  return (positions + KvCache::step - 1) / KvCache::step * KvCache::step;
}

KvCache::View KvCache::append(const mx::array& keys, const mx::array& values, int reserve) {
  const int end = length_ + keys.shape(2);
  if (end > capacity()) {
    const int capacity = rounded_capacity(std::max(end, reserve));
    keys_ = enlarged(keys_, keys, length_, capacity);
    values_ = enlarged(values_, values, length_, capacity);
  }
  keys_ = written(keys_, keys, length_);
  values_ = written(values_, values, length_);
  length_ = end;
  return {first_positions(*keys_, end), first_positions(*values_, end)};
}

std::optional<KvCache::View> KvCache::view() const {
  return keys_ ? std::optional(View{first_positions(*keys_, length_), first_positions(*values_, length_)})
               : std::nullopt;
}

std::vector<mx::array> KvCache::arrays() const {
  return keys_ ? std::vector{*keys_, *values_} : std::vector<mx::array>{};
}

} // namespace cleave
