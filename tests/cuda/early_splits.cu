// model.cu with more KV splits after few positions, so that a short test passes the changes.
#define MK_MORE_SPLITS 20, 21
#include "model.cu"
