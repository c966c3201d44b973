/* Tensors and arrays: what they say, and copies between strided and contiguous memory. */
#include "aclnn/aclnn.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct aclIntArray {
    uint64_t size;
    int64_t value[];
};

size_t aclnn_type_bytes(aclDataType type)
{
    switch (type) {
    case ACL_DOUBLE: case ACL_INT64: return 8;
    case ACL_FLOAT: case ACL_INT32: return 4;
    case ACL_FLOAT16: case ACL_BF16: return 2;
    case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
    case ACL_DT_UNDEFINED: break;
    }
    return 0;
}

int64_t aclnn_elements(const struct aclTensor *tensor)
{
    int64_t count = 1;

    for (int d = 0; d < tensor->dims; d++)
        count *= tensor->shape[d];
    return count;
}

bool aclnn_dense(const struct aclTensor *tensor, const int *order)
{
    int64_t step = 1;

    for (int i = tensor->dims; i-- > 0; step *= tensor->shape[order[i]])
        if (tensor->shape[order[i]] != 1 && tensor->stride[order[i]] != step)
            return false;
    return true;
}

bool aclnn_contiguous(const struct aclTensor *tensor)
{
    static const int order[ACLNN_DIMS_MAX] = {0, 1, 2, 3, 4, 5, 6, 7};

    return aclnn_elements(tensor) == 0 || aclnn_dense(tensor, order);
}

void *aclnn_address(const struct aclTensor *tensor)
{
    return tensor->data ? tensor->data + tensor->offset * (int64_t)aclnn_type_bytes(tensor->type) : NULL;
}

enum hmoe_dtype aclnn_dtype(aclDataType type)
{
    return type == ACL_FLOAT ? HMOE_F32 : type == ACL_BF16 ? HMOE_BF16 : HMOE_F16;
}

size_t aclnn_staged_bytes(const struct aclTensor *tensor)
{
    size_t bytes;

    if (tensor->dims != 2 || aclnn_contiguous(tensor))
        return 0;
    bytes = (size_t)aclnn_elements(tensor) * aclnn_type_bytes(tensor->type);
    return (bytes + ACLNN_LINE - 1) / ACLNN_LINE * ACLNN_LINE;
}

static char *element(const struct aclTensor *tensor, int64_t row, int64_t column)
{
    int64_t at = row * tensor->stride[0] + column * tensor->stride[1];

    return (char *)aclnn_address(tensor) + at * (int64_t)aclnn_type_bytes(tensor->type);
}

void aclnn_gather(const struct aclTensor *from, void *to)
{
    size_t bytes = aclnn_type_bytes(from->type);
    char *at = to;

    for (int64_t r = 0; r < from->shape[0]; r++)
        for (int64_t c = 0; c < from->shape[1]; c++, at += bytes)
            memcpy(at, element(from, r, c), bytes);
}

void aclnn_scatter(const void *from, const struct aclTensor *to)
{
    size_t bytes = aclnn_type_bytes(to->type);
    const char *at = from;

    for (int64_t r = 0; r < to->shape[0]; r++)
        for (int64_t c = 0; c < to->shape[1]; c++, at += bytes)
            memcpy(element(to, r, c), at, bytes);
}

/* ---- made and destroyed */

static bool copy_dims(const char *name, const int64_t *from, uint64_t count, int64_t *to)
{
    if (count > ACLNN_DIMS_MAX || (count && !from)) {
        aclnn_fail(ACLNN_ERR_PARAM_INVALID, "%s is %p with %" PRIu64 " numbers: at most %d, not NULL, are allowed",
                   name,
                   (const void *)from, count, ACLNN_DIMS_MAX);
        return false;
    }
    for (uint64_t d = 0; d < count; d++) {
        if (from[d] < 0) {
            aclnn_fail(ACLNN_ERR_PARAM_INVALID, "%s[%" PRIu64 "] is %" PRId64 ": at least 0 is allowed", name, d,
                       from[d]);
            return false;
        }
        to[d] = from[d];
    }
    return true;
}

static void contiguous_strides(struct aclTensor *tensor)
{
    int64_t step = 1;

    for (int d = tensor->dims; d-- > 0; step *= tensor->shape[d])
        tensor->stride[d] = step;
}

/* The elements of storage that the view reaches, or more than there can be. */
static int64_t reach(const struct aclTensor *tensor)
{
    int64_t last = tensor->offset, step;

    if (aclnn_elements(tensor) == 0)
        return 0;
    for (int d = 0; d < tensor->dims; d++)
        if (__builtin_mul_overflow(tensor->shape[d] - 1, tensor->stride[d], &step) ||
            __builtin_add_overflow(last, step, &last))
            return INT64_MAX;
    return last < INT64_MAX ? last + 1 : last;
}

/* No number of elements is too large to count. */
static bool countable(const char *name, const int64_t *dims, int count)
{
    int64_t all = 1;

    for (int d = 0; d < count; d++)
        if (__builtin_mul_overflow(all, dims[d] ? dims[d] : 1, &all) || all > INT64_MAX / 16) {
            aclnn_fail(ACLNN_ERR_PARAM_INVALID, "%s has more elements than can be counted", name);
            return false;
        }
    return true;
}

static bool fits(struct aclTensor *tensor, const int64_t *storage, uint64_t count)
{
    int64_t there = 1;

    if (!storage) {
        tensor->storage_dims = 1;
        tensor->storage[0] = reach(tensor);
        return true;
    }
    if (!copy_dims("storageDims", storage, count, tensor->storage) ||
        !countable("storageDims", tensor->storage, (int)count))
        return false;
    tensor->storage_dims = (int)count;
    for (uint64_t d = 0; d < count; d++)
        there *= tensor->storage[d];
    if (reach(tensor) > there)
        aclnn_fail(ACLNN_ERR_PARAM_INVALID, "the view reaches element %" PRId64 " of a storage of %" PRId64
                   ": it must lie inside", reach(tensor) - 1, there);
    return reach(tensor) <= there;
}

static bool describe(struct aclTensor *tensor, const int64_t *dims, uint64_t count, const int64_t *stride)
{
    if (!copy_dims("viewDims", dims, count, tensor->shape) || !countable("viewDims", tensor->shape, (int)count) ||
        (stride && !copy_dims("stride", stride, count, tensor->stride)))
        return false;
    tensor->dims = (int)count;
    if (!stride)
        contiguous_strides(tensor);
    if (tensor->offset < 0)
        aclnn_fail(ACLNN_ERR_PARAM_INVALID, "offset is %" PRId64 ": at least 0 is allowed", tensor->offset);
    else if (tensor->format != ACL_FORMAT_ND)
        aclnn_fail(ACLNN_ERR_PARAM_INVALID, "format is %d: ACL_FORMAT_ND (2) is allowed", (int)tensor->format);
    else if (!aclnn_type_bytes(tensor->type))
        aclnn_fail(ACLNN_ERR_PARAM_INVALID, "dataType is %d: it must be a type of elements", (int)tensor->type);
    else
        return true;
    return false;
}

aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t *stride,
                           int64_t offset, aclFormat format, const int64_t *storageDims, uint64_t storageDimsNum,
                           void *tensorData)
{
    struct aclTensor *tensor = calloc(1, sizeof *tensor);

    if (!tensor) {
        aclnn_fail(ACLNN_ERR_INNER, "no memory for a tensor");
        return NULL;
    }
    tensor->type = dataType;
    tensor->offset = offset;
    tensor->format = format;
    tensor->data = tensorData;
    if (describe(tensor, viewDims, viewDimsNum, stride) && fits(tensor, storageDims, storageDimsNum))
        return tensor;
    free(tensor);
    return NULL;
}

aclnnStatus aclDestroyTensor(const aclTensor *tensor)
{
    free((void *)(uintptr_t)tensor);
    return ACLNN_SUCCESS;
}

/* ---- what they say */

static aclnnStatus all_there(const void *object, const void *first, const void *second)
{
    if (object && first && second)
        return ACLNN_SUCCESS;
    return aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "%s is NULL", object ? "an output" : "tensor");
}

static aclnnStatus give(const int64_t *from, int count, int64_t **dims, uint64_t *number)
{
    int64_t *made = malloc(((size_t)count + 1) * sizeof *made);

    if (!made)
        return aclnn_fail(ACLNN_ERR_INNER, "no memory for %d numbers", count);
    memcpy(made, from, (size_t)count * sizeof *made);
    *dims = made;
    *number = (uint64_t)count;
    return ACLNN_SUCCESS;
}

aclnnStatus aclGetViewShape(const aclTensor *tensor, int64_t **viewDims, uint64_t *viewDimsNum)
{
    aclnnStatus status = all_there(tensor, viewDims, viewDimsNum);

    return status ? status : give(tensor->shape, tensor->dims, viewDims, viewDimsNum);
}

aclnnStatus aclGetViewStrides(const aclTensor *tensor, int64_t **stridesValue, uint64_t *stridesNum)
{
    aclnnStatus status = all_there(tensor, stridesValue, stridesNum);

    return status ? status : give(tensor->stride, tensor->dims, stridesValue, stridesNum);
}

aclnnStatus aclGetStorageShape(const aclTensor *tensor, int64_t **storageDims, uint64_t *storageDimsNum)
{
    aclnnStatus status = all_there(tensor, storageDims, storageDimsNum);

    return status ? status : give(tensor->storage, tensor->storage_dims, storageDims, storageDimsNum);
}

aclnnStatus aclGetViewOffset(const aclTensor *tensor, int64_t *offset)
{
    aclnnStatus status = all_there(tensor, offset, offset);

    if (status == ACLNN_SUCCESS)
        *offset = tensor->offset;
    return status;
}

aclnnStatus aclGetDataType(const aclTensor *tensor, aclDataType *dataType)
{
    aclnnStatus status = all_there(tensor, dataType, dataType);

    if (status == ACLNN_SUCCESS)
        *dataType = tensor->type;
    return status;
}

aclnnStatus aclGetFormat(const aclTensor *tensor, aclFormat *format)
{
    aclnnStatus status = all_there(tensor, format, format);

    if (status == ACLNN_SUCCESS)
        *format = tensor->format;
    return status;
}

/* ---- arrays */

aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size)
{
    struct aclIntArray *array = NULL;

    if (size && !value) {
        aclnn_fail(ACLNN_ERR_PARAM_NULLPTR, "value is NULL");
        return NULL;
    }
    if (size < SIZE_MAX / sizeof *value - 1)
        array = malloc(sizeof *array + size * sizeof *value);
    if (!array) {
        aclnn_fail(ACLNN_ERR_INNER, "no memory for %" PRIu64 " numbers", size);
        return NULL;
    }
    array->size = size;
    if (size)
        memcpy(array->value, value, size * sizeof *value);
    return array;
}

aclnnStatus aclGetIntArraySize(const aclIntArray *array, uint64_t *size)
{
    aclnnStatus status = all_there(array, size, size);

    if (status == ACLNN_SUCCESS)
        *size = array->size;
    return status;
}

aclnnStatus aclDestroyIntArray(const aclIntArray *array)
{
    free((void *)(uintptr_t)array);
    return ACLNN_SUCCESS;
}
