
size_t workspace_bytes(Operator op, const Sizes& size, Type type) {
  using namespace detail;
  if (op == Operator::delta_backward)
    return bytes_of_tokens(size, type, size.Dv) + (in_state_type(type) ? 0 : bytes_of_tokens(size, type, size.Dk));
  if (op == Operator::gated_backward) return bytes_of_tokens(size, type, size.Dk);
  return 0;
}

