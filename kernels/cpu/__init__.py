"""Operations of a CPU in a small C++ library of our own, built when it is first used."""
