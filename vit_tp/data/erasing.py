class Erasing: ...


def build_erasing(data):
    return None
