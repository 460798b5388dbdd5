"""Operations on a model: replace, freeze, explain, warm up, compile ahead of time."""
