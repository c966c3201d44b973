/* HyperMegaMoE by way of ACLNN's calling convention: two phases, opaque tensors and executors, streams.
 *
 * The names, values and the order of calls are those of CANN's ACLNN interface, so that code written for it can call
 * this layer on a CPU. A library of its own, libhmoe_aclnn, over libhmoe; not for one program with CANN's libraries.
 *
 *   aclnn...GetWorkspaceSize(tensors, group, attributes, outputs, &workspaceSize, &executor)   checks, no communication
 *   aclnn...(workspace, workspaceSize, executor, stream)                                        runs
 *
 * Letters: T tokens on this rank, H hidden, I inner width, K experts per token, L = E/R experts on this rank. Every
 * function that returns aclnnStatus leaves a sentence for aclGetRecentErrMsg when it fails, and changes nothing.
 */
#ifndef ACLNN_HYPER_MEGA_MOE_H
#define ACLNN_HYPER_MEGA_MOE_H

#include <hmoe.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- statuses */

typedef int32_t aclnnStatus;
typedef int32_t aclError;

enum {
    ACL_SUCCESS = 0,
    ACLNN_SUCCESS = 0,
    ACLNN_ERR_PARAM_NULLPTR = 161001,            /* a required argument is NULL */
    ACLNN_ERR_PARAM_INVALID = 161002,            /* a type, shape, stride, name or attribute is not allowed */
    ACLNN_ERR_RUNTIME_ERROR = 361001,            /* what hmoe_forward or hmoe_backward ran into, or a group in use */
    ACLNN_ERR_INNER = 561000,                    /* no memory or no thread */
    ACLNN_ERR_INNER_INFERSHAPE_ERROR = 561001,   /* an output has not the shape that follows from the inputs */
    ACLNN_ERR_INNER_TILING_ERROR = 561002,       /* shapes and attributes that the library cannot do */
    ACLNN_ERR_INNER_CREATE_EXECUTOR = 561101,    /* no memory for an executor */
    ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR = 561102, /* the executor was used already, or is the other function's */
    ACLNN_ERR_INNER_NULLPTR = 561103             /* the executor is NULL */
};

/* What went wrong in this thread's latest failed call. Owns: the thread's. Threads: any. Blocks: no. Ranks: one. */
HMOE_API const char *aclGetRecentErrMsg(void);

/* Nothing needs to be set up; configPath is not read. finalize: ACLNN_ERR_RUNTIME_ERROR while groups are alive. */
HMOE_API aclnnStatus aclnnInit(const char *configPath);
HMOE_API aclnnStatus aclnnFinalize(void);

/* ----------------------------------------------------------------- tensors */

typedef enum aclDataType {
    ACL_DT_UNDEFINED = -1,
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT64 = 9,
    ACL_DOUBLE = 11,
    ACL_BOOL = 12,
    ACL_BF16 = 27
} aclDataType;

typedef enum aclFormat { ACL_FORMAT_UNDEFINED = -1, ACL_FORMAT_ND = 2 } aclFormat;

typedef struct aclTensor aclTensor;
typedef struct aclIntArray aclIntArray;
typedef struct aclOpExecutor aclOpExecutor;
typedef void *aclrtStream;

/* A view of the caller's data. Dimensions (at most 8), strides and offset are in elements; stride NULL: contiguous;
 * storageDims NULL: as large as the view needs. NULL when something is not allowed, or without memory.
 * Owns: the caller, who may destroy it right after phase one; the data are never owned.
 * Threads: any. Blocks: no. Ranks: one. */
HMOE_API aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType,
                                    const int64_t *stride, int64_t offset, aclFormat format,
                                    const int64_t *storageDims, uint64_t storageDimsNum, void *tensorData);
HMOE_API aclnnStatus aclDestroyTensor(const aclTensor *tensor);

/* What a tensor was made of. Owns: the caller frees the arrays with free(). Threads: any. Blocks: no. Ranks: one. */
HMOE_API aclnnStatus aclGetViewShape(const aclTensor *tensor, int64_t **viewDims, uint64_t *viewDimsNum);
HMOE_API aclnnStatus aclGetViewStrides(const aclTensor *tensor, int64_t **stridesValue, uint64_t *stridesNum);
HMOE_API aclnnStatus aclGetViewOffset(const aclTensor *tensor, int64_t *offset);
HMOE_API aclnnStatus aclGetStorageShape(const aclTensor *tensor, int64_t **storageDims, uint64_t *storageDimsNum);
HMOE_API aclnnStatus aclGetDataType(const aclTensor *tensor, aclDataType *dataType);
HMOE_API aclnnStatus aclGetFormat(const aclTensor *tensor, aclFormat *format);

HMOE_API aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size);
HMOE_API aclnnStatus aclGetIntArraySize(const aclIntArray *array, uint64_t *size);
HMOE_API aclnnStatus aclDestroyIntArray(const aclIntArray *array);

/* --------------------------------------------------------------- executors */

/* A repeatable executor may go through phase two again and again, and is destroyed by the caller; any other is used up
 * by its phase two. The setters give the tensor of an index, counted in the order of the arguments, another address for
 * the phases two to come; `tensor` may be NULL. ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR when it is used up.
 * Owns: the group keeps executors. Threads: one at a time. Blocks: no. Ranks: one. */
HMOE_API aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
HMOE_API aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);
HMOE_API aclnnStatus aclSetInputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
HMOE_API aclnnStatus aclSetOutputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);

/* ----------------------------------------------------------------- streams */

/* A queue of phases two, run one after the other by a thread of the stream. The stream NULL runs each before its
 * function returns. synchronize returns the first failure since the last one; destroy waits and returns it, too.
 * Owns: the caller. Threads: any. Blocks: synchronize, destroy. Ranks: one. */
HMOE_API aclError aclrtCreateStream(aclrtStream *stream);
HMOE_API aclError aclrtSynchronizeStream(aclrtStream stream);
HMOE_API aclError aclrtDestroyStream(aclrtStream stream);

/* ------------------------------------------------------------------ groups */

/* hmoe_group_create with a name of 1 to 127 characters, by which the calls below find it; in one process a name may be
 * used once for each rank. destroy: with no phase two under way; what was saved in its tensors is lost.
 * Owns: the process, until destroyed. Threads: any, one at a time for a group. Blocks: for the other ranks.
 * Ranks: all. */
HMOE_API aclnnStatus aclnnHyperMegaMoEGroupCreate(const char *group, const struct hmoe_group_options *options);
HMOE_API aclnnStatus aclnnHyperMegaMoEGroupDestroy(const char *group, int64_t epRankId);

/* ----------------------------------------------------------------- forward */

/* y = the layer of x (include/hmoe.h).
 *   x [T,H] FLOAT, FLOAT16 or BF16; topkIds [T,K] INT32 or INT64, -1 masks a slot; topkWeights [T,K] FLOAT or x's type;
 *   upProjWeight [L,H,2I], downProjWeight [L,I,H]: of x's type, both contiguous or both the transposed view of a
 *   contiguous [L,2I,H], [L,H,I]; moeExpertNum E, a multiple of epWorldSize.
 *   maxTokens: the largest T of any rank, the same on all of them; 0: every rank has this T.
 *   maxRecvRows: the most rows a rank may receive; 0: the worst case, epWorldSize * maxTokens * K.
 *   y [T,H] of x's type.
 *   savedOut: NULL, or for the gradient: a UINT8 tensor of one dimension. Without data its dimension is set to the
 *   bytes that are needed, and the address follows by aclSetOutputTensorAddr (index 1); with data it must have as many.
 * Activations may have any strides: what is not contiguous is copied by way of the workspace.
 * Owns: nothing but its copies of what tensors say; data and workspace are the caller's until phase two has run.
 * Threads: phase one any; phases two of a group in the order of the calls that all ranks make.
 * Blocks: phase two on the stream NULL. Ranks: phase one: one; phase two: all. */
HMOE_API aclnnStatus aclnnHyperMegaMoEGetWorkspaceSize(
    const aclTensor *x, const aclTensor *topkIds, const aclTensor *topkWeights, const aclTensor *upProjWeight,
    const aclTensor *downProjWeight, const char *group, int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum,
    int64_t maxTokens, int64_t maxRecvRows, aclTensor *y, aclTensor *savedOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
HMOE_API aclnnStatus aclnnHyperMegaMoE(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                       aclrtStream stream);

/* ---------------------------------------------------------------- gradient */

/* The gradients of a forward whose savedOut is `saved`, at the same address; tensors and attributes as there, the data
 * may have moved. A saved state is used up by its gradient; one that never was filled, was used, moved or belongs to
 * another group is ACLNN_ERR_PARAM_INVALID, found in phase two.
 *   dy, dx [T,H] of x's type; dTopkWeights [T,K] of topkWeights' type; dUpProjWeight, dDownProjWeight: shape and layout
 *   of their weights, both of x's type or both FLOAT, overwritten. Outputs may be NULL: not wanted. */
HMOE_API aclnnStatus aclnnHyperMegaMoEGradGetWorkspaceSize(
    const aclTensor *dy, const aclTensor *x, const aclTensor *topkIds, const aclTensor *topkWeights,
    const aclTensor *upProjWeight, const aclTensor *downProjWeight, const aclTensor *saved, const char *group,
    int64_t epWorldSize, int64_t epRankId, int64_t moeExpertNum, int64_t maxTokens, int64_t maxRecvRows, aclTensor *dx,
    aclTensor *dTopkWeights, aclTensor *dUpProjWeight, aclTensor *dDownProjWeight, uint64_t *workspaceSize,
    aclOpExecutor **executor);
HMOE_API aclnnStatus aclnnHyperMegaMoEGrad(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                           aclrtStream stream);

#ifdef __cplusplus
}
#endif
#endif
