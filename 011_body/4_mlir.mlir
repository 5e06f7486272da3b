func.func private @_mlir_ciface_pbk_trace(i64, i64, i64)
func.func @k0_body(%a0: memref<64xf32> {llvm.noalias}, %a1: memref<64xf32> {llvm.noalias}, %arena: memref<320xi8> {llvm.noalias}, %low: index, %high: index) {
%v1 = arith.constant 4 : index
%v6 = arith.constant 0 : i32
%v8 = arith.constant 7 : i32
%v11 = arith.constant 32 : index
%v13 = arith.constant 8 : index
%v18 = arith.constant 0x41500000 : f32
%v21 = arith.constant 0 : index
%v24 = arith.constant 1 : i32
%v50 = arith.constant 1 : index
%v53 = arith.constant 64 : index
%v54 = arith.constant 128 : index
%v55 = arith.constant 192 : index
%v56 = arith.constant 256 : index
%t4 = memref.view %arena[%v21][] : memref<320xi8> to memref<1xi32>
%t8 = memref.view %arena[%v53][] : memref<320xi8> to memref<1xi32>
%t6 = memref.view %arena[%v54][] : memref<320xi8> to memref<1xf32>
%t9 = memref.view %arena[%v55][] : memref<320xi8> to memref<1xi32>
%t7 = memref.view %arena[%v56][] : memref<320xi8> to memref<1xi32>
%t0 = memref.view %arena[%v21][] : memref<320xi8> to memref<1xi32>
scf.for %p = %low to %high step %v50 {
%v2 = arith.remui %p, %v1 : index
%v3 = arith.divui %p, %v1 : index
%v12 = arith.muli %v3, %v11 : index
%v14 = arith.muli %v2, %v13 : index
%v15 = arith.addi %v12, %v14 : index
scf.for %v4 = %v21 to %v13 step %v50 {
%v5 = arith.index_cast %v4 : index to i32
%v7 = arith.maxsi %v5, %v6 : i32
%v9 = arith.minsi %v7, %v8 : i32
%v10 = arith.index_cast %v9 : i32 to index
%v16 = arith.addi %v15, %v10 : index
%v17 = memref.load %a0[%v16] : memref<64xf32>
%v19 = arith.cmpf oeq, %v17, %v18 : f32
%v20 = arith.extui %v19 : i1 to i32
memref.store %v20, %t4[%v21] : memref<1xi32>
%v22 = memref.load %t4[%v21] : memref<1xi32>
%v23 = arith.maxsi %v22, %v6 : i32
%v25 = arith.minsi %v23, %v24 : i32
%v26 = arith.index_cast %v25 : i32 to index
%v27 = arith.cmpi eq, %v26, %v21 : index
scf.if %v27 {
} else {
%v28 = arith.index_cast %v4 : index to i32
%v29 = arith.maxsi %v28, %v6 : i32
%v30 = arith.minsi %v29, %v8 : i32
%v31 = arith.index_cast %v30 : i32 to index
%v32 = arith.addi %v15, %v31 : index
%v33 = memref.load %a0[%v32] : memref<64xf32>
memref.store %v33, %t6[%v21] : memref<1xf32>
%v34 = arith.index_cast %v4 : index to i32
memref.store %v34, %t7[%v21] : memref<1xi32>
%v35 = arith.index_cast %v3 : index to i32
memref.store %v35, %t8[%v21] : memref<1xi32>
%v36 = arith.index_cast %v2 : index to i32
memref.store %v36, %t9[%v21] : memref<1xi32>
%v37 = arith.constant 8 : i64
%v38 = memref.extract_aligned_pointer_as_index %t6 : memref<1xf32> -> index
%v39 = arith.index_cast %v38 : index to i64
%v40 = arith.constant 0 : i64
func.call @_mlir_ciface_pbk_trace(%v37, %v40, %v39) : (i64, i64, i64) -> ()
%v41 = memref.extract_aligned_pointer_as_index %t7 : memref<1xi32> -> index
%v42 = arith.index_cast %v41 : index to i64
%v43 = arith.constant 1 : i64
func.call @_mlir_ciface_pbk_trace(%v37, %v43, %v42) : (i64, i64, i64) -> ()
%v44 = memref.extract_aligned_pointer_as_index %t8 : memref<1xi32> -> index
%v45 = arith.index_cast %v44 : index to i64
%v46 = arith.constant 2 : i64
func.call @_mlir_ciface_pbk_trace(%v37, %v46, %v45) : (i64, i64, i64) -> ()
%v47 = memref.extract_aligned_pointer_as_index %t9 : memref<1xi32> -> index
%v48 = arith.index_cast %v47 : index to i64
%v49 = arith.constant 3 : i64
func.call @_mlir_ciface_pbk_trace(%v37, %v49, %v48) : (i64, i64, i64) -> ()
}
}
%v51 = arith.index_cast %v13 : index to i32
memref.store %v51, %t0[%v21] : memref<1xi32>
%v52 = vector.load %a0[%v15] : memref<64xf32>, vector<8xf32>
vector.store %v52, %a1[%v15] : memref<64xf32>, vector<8xf32>
}
return
}
func.func private @k0_body(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64)
func.func private @pbk_task0(%args: !llvm.ptr, %low: i64, %high: i64, %slot: i64) {
%g0 = llvm.getelementptr %args[0] : (!llvm.ptr) -> !llvm.ptr, i8
%p0 = llvm.load %g0 : !llvm.ptr -> !llvm.ptr
%g1 = llvm.getelementptr %args[8] : (!llvm.ptr) -> !llvm.ptr, i8
%p1 = llvm.load %g1 : !llvm.ptr -> !llvm.ptr
%g2 = llvm.getelementptr %args[16] : (!llvm.ptr) -> !llvm.ptr, i8
%p2 = llvm.load %g2 : !llvm.ptr -> !llvm.ptr
%size = arith.constant 320 : i64
%at = arith.muli %slot, %size : i64
%mine = llvm.getelementptr %p2[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i8
func.call @k0_body(%p0, %p1, %mine, %low, %high) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64) -> ()
return
}
func.func @pbk_main(%frame: !llvm.ptr, %buffers: !llvm.ptr, %arena: !llvm.ptr) {
%h1 = arith.constant 1 : i64
%h2 = llvm.alloca %h1 x !llvm.array<3 x ptr> : (i64) -> !llvm.ptr
%h3 = llvm.getelementptr %arena[0] : (!llvm.ptr) -> !llvm.ptr, i8
%h4 = llvm.getelementptr %buffers[0] : (!llvm.ptr) -> !llvm.ptr, i8
%h5 = llvm.load %h4 : !llvm.ptr -> !llvm.ptr
%h6 = llvm.getelementptr %buffers[8] : (!llvm.ptr) -> !llvm.ptr, i8
%h7 = llvm.load %h6 : !llvm.ptr -> !llvm.ptr
%h8 = llvm.getelementptr %h2[0] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h5, %h8 : !llvm.ptr, !llvm.ptr
%h9 = llvm.getelementptr %h2[8] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h7, %h9 : !llvm.ptr, !llvm.ptr
%h10 = llvm.getelementptr %h2[16] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h3, %h10 : !llvm.ptr, !llvm.ptr
%h11 = arith.constant 8 : i64
%h12 = arith.constant 0 : i64
func.call @pbk_task0(%h2, %h12, %h11, %h12) : (!llvm.ptr, i64, i64, i64) -> ()
return
}
