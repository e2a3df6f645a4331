def triton_decode():
    raise NotImplementedError
